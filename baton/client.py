"""The client SDK: generate text with a Baton cluster.

    >>> from baton import AsyncClient
    >>> async with await AsyncClient.connect("127.0.0.1:50051") as client:
    ...     generation = client.generate("The capital of France is", max_tokens=16)
    ...     async for chunk in generation:
    ...         print(chunk.text, end="")
     Paris.
    >>> generation.summary.finish_reason
    'stop'

It shows no protobuf type. A client does not survive a fork; connect in the child.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc.aio

from baton.answer import ModelInfo
from baton.chat_messages import Message
from baton.client_tls import TlsConfig, opener
from baton.connection import Connection
from baton.errors import ConfigError, DeadlineExceeded, IncompleteAnswer, InvalidRequest
from baton.generate_request import build_request
from baton.generation import Generation
from baton.retry import DEFAULT_RETRY, Retry, Tries
from baton.routers import Routers
from baton.rpc import is_from_baton, translate
from baton.structured import SchemaT, grammar_of, read
from baton.telemetry import ROOT_SPAN, start_span
from baton.timeouts import check_timeout
from baton.v1 import inference_service_pb2


class AsyncClient:
    """A connection to the routers of one cluster. Made by `await AsyncClient.connect(target)`.

    Belongs to the event loop that it was made on; any number of tasks may use it at once.
    """

    def __init__(self, routers: Routers, retry: Retry = DEFAULT_RETRY) -> None:
        self._routers = routers
        self._retry = retry
        self._rng = random.Random()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._routers.target}>"

    @classmethod
    async def connect(
        cls,
        target: str | Sequence[str] | None = None,
        *,
        api_key: str | Callable[[], str] | None = None,
        tls: bool | TlsConfig | None = None,
        tls_ca: str | os.PathLike[str] | None = None,
        insecure_key: bool = False,
        lazy: bool = False,
        timeout_s: float = 10.0,
        retry: Retry = DEFAULT_RETRY,
        interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
    ) -> Self:
        """Connects to a router, or to the first of several that answers.

        An answer whose router is lost in the middle goes on at the next one, without a seam.

        >>> client = await AsyncClient.connect(["127.0.0.1:50051", "127.0.0.1:50052"], timeout_s=5.0)
        >>> [model.name for model in await client.list_models()]
        ['tiny']
        >>> await client.close()

        Args:
            target: "host:port", or one of gRPC's names such as "dns:///baton-router:50051", over whose
                addresses calls are spread; several are routers of one cluster. None: BATON_ADDRESS, or
                127.0.0.1:50051.
            api_key: who is calling, to routers that tell tenants apart; every call carries it. A function
                is asked for it before each call. None: BATON_API_KEY, or nobody.
            tls: True for TLS with the public authorities, a TlsConfig for others, False for plain text.
                None: TLS if tls_ca says so, or if an API key would leave this machine.
            tls_ca: PEM file with the authority that signed the routers' certificates; short for a TlsConfig
                with that one. None: BATON_TLS_CA, or none.
            insecure_key: send the API key in plain text, because something else encrypts the way.
            lazy: return at once; the first call connects, and what it meets is its own failure.
            timeout_s: longest time to connect, in seconds; infinity for no limit.
            retry: how long and how often a call that failed for now is made again.
            interceptors: grpc.aio's, for every call to a router, the outermost first: a
                UnaryStreamClientInterceptor sees generations, a UnaryUnaryClientInterceptor the rest.

        Raises:
            Unavailable: none answers within timeout_s.
            ConfigError: an argument or variable cannot be used; it names which.
        """
        connection = Connection.resolve(
            target,
            tls=tls,
            tls_ca=tls_ca,
            api_key=api_key,
            insecure_key=insecure_key,
            environ=os.environ,
        )
        longest_s = check_timeout(timeout_s, ConfigError)
        opening = opener(connection.tls, interceptors)
        routers = Routers(connection.targets, opening, connection.api_key)
        if not lazy:
            # One that does not ask again does not wait for a router to come up either.
            await routers.find(longest_s, max_rounds=1 if retry.is_once else None)
        return cls(routers, retry)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Generation:
        """Starts one generation and returns it; iterate over it for the chunks, or await its text.

        >>> from baton import Grammar
        >>> client = await AsyncClient.connect("127.0.0.1:50051")
        >>> letters = Grammar(kind="regex", source="[a-z ]+")
        >>> for answer in await client.generate("A word for it is", n=2, grammar=letters).answers():
        ...     print(answer.index, answer.text, answer.finish_reason)
        0  baton stop
        1  relay stop
        >>> await client.close()

        Args:
            prompt: text to continue. Exactly one of prompt, messages and token_ids is given.
            messages: a conversation; see chat().
            token_ids: a tokenized prompt.
            timeout_s: deadline for the whole answer, all tries included, in seconds, at most a year; None or
                infinity for none.
            options: as GenerateRequest in protos/baton/v1/inference_service.proto describes them.
                Sampling: max_tokens, min_tokens, temperature, top_k, top_p, min_p, seed, ignore_eos,
                stop_token_ids, allowed_token_ids, logit_bias (a mapping from token id to value),
                repetition_penalty, presence_penalty, frequency_penalty.
                Structure: grammar, a baton.Grammar; parse() makes one of a class.
                Text: stop (a text or several), include_stop_in_text, skip_special_tokens.
                Detail: n, logprobs, top_logprobs, prompt_logprobs.
                Service: priority ("low", "normal" or "high"), ttft_objective_ms.
                Conversations: tools, template_arguments; see chat().
                Others: model, truncate_prompt_tokens, request_id.

        Raises:
            InvalidRequest: an option or timeout_s is unknown or cannot be sent; the router's own
                refusals arrive while iterating.
        """
        timeout_s = check_timeout(timeout_s)
        if options.get("request_id") in (None, ""):
            # Drawn here, so that it is known of a request, too, that no router takes.
            options["request_id"] = f"req-{secrets.token_hex(8)}"
        request = build_request(prompt, messages, token_ids, options)
        span = start_span(ROOT_SPAN)
        return Generation(self._routers, request, span, timeout_s, self._rng, retry=self._retry)

    def chat(
        self, messages: str | Sequence[Message], *, timeout_s: float | None = None, **options: Any
    ) -> Generation:
        """Starts the next answer of a conversation; a text is one message of the user.

        >>> client = await AsyncClient.connect("127.0.0.1:50051")
        >>> await client.chat("What is the capital of France?").text()
        'Paris.'
        >>> messages = [
        ...     {"role": "system", "content": "Be brief."},
        ...     {"role": "user", "content": "And of Peru?"},
        ... ]
        >>> await client.chat(messages, max_tokens=16).text()
        'Lima.'
        >>> await client.close()

        Args:
            messages: oldest first, each with "role" ("system", "user", "assistant" or "tool") and
                "content". One of the assistant may have "tool_calls", each {"id", "type": "function",
                "function": {"name", "arguments"}}; one of a tool has "tool_call_id".
            timeout_s: as in generate().
            options: as in generate(), and for models whose templates take them: tools, functions as
                {"type": "function", "function": {...}}; template_arguments, a mapping.

        Raises:
            InvalidRequest: as generate().
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.generate(messages=messages, timeout_s=timeout_s, **options)

    async def parse(
        self,
        cls: type[SchemaT],
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> SchemaT:
        """An answer as a value of a class; the model can write nothing else.

        >>> from pydantic import BaseModel
        >>> class City(BaseModel):
        ...     name: str
        ...     population: int
        >>> client = await AsyncClient.connect("127.0.0.1:50051")
        >>> await client.parse(City, "The largest city of Peru, as JSON: ", max_tokens=64)
        City(name='Lima', population=10092000)
        >>> await client.close()

        The model does not see the schema; say in the prompt what is wanted.

        Args:
            cls: a pydantic model, or any class with model_json_schema() and model_validate_json().
            prompt, messages, token_ids, timeout_s, options: as in generate(), without grammar and n.

        Raises:
            IncompleteAnswer: max_tokens, the context or a stop ended the answer too early; it has the text.
            pydantic.ValidationError: JSON that the class refuses for what no schema says.
            BatonError: as generate() and its iteration.
        """
        for name in ("grammar", "n"):
            if options.get(name) is not None:
                raise InvalidRequest(f"{name} is not an option of parse(), which gives one value", field=name)
        generation = self.generate(
            prompt,
            messages=messages,
            token_ids=token_ids,
            timeout_s=timeout_s,
            grammar=grammar_of(cls),
            **options,
        )
        async with generation:
            (answer,) = await generation.answers()
        try:
            return read(cls, answer)
        except IncompleteAnswer as error:
            error.request_id = generation.request_id
            raise

    async def list_models(self, *, timeout_s: float = 10.0) -> list[ModelInfo]:
        """The models this cluster serves.

        Raises:
            Unauthenticated: the router wants an API key, or another one.
            Overloaded, Unavailable: no router answered within what `retry` allows.
            DeadlineExceeded: timeout_s has passed, all tries included.
        """
        tries = Tries(self._retry, self._rng)
        try:
            async with asyncio.timeout(check_timeout(timeout_s)) as deadline:
                while True:
                    target = self._routers.target
                    try:
                        response = await self._routers.stub.ListModels(
                            inference_service_pb2.ListModelsRequest(), metadata=self._routers.metadata
                        )
                    except grpc.aio.AioRpcError as error:
                        await self._pause(error, tries)
                        self._routers.lose(target)
                    else:
                        return [ModelInfo.from_proto(model) for model in response.models]
        except TimeoutError:
            if not deadline.expired():
                # That of a function that gives the key.
                raise
            raise DeadlineExceeded("the deadline passed before a router answered") from None

    async def close(self) -> None:
        """Ends all calls and the connection; idempotent."""
        await self._routers.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _pause(self, error: grpc.aio.AioRpcError, tries: Tries) -> None:
        """Until the next try; raises what the failed call stands for if there is none."""
        failure, now = translate(error), asyncio.get_running_loop().time()
        pause_s = tries.pause_after(failure, now, is_routers_word=is_from_baton(error))
        if pause_s is None:
            raise failure from None
        await asyncio.sleep(pause_s)
