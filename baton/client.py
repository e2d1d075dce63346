"""The client SDK: generate text with a Baton cluster.

    from baton import AsyncClient

    async with await AsyncClient.connect("127.0.0.1:50051") as client:
        generation = client.generate("The capital of France is", max_tokens=16)
        async for chunk in generation:
            print(chunk.text, end="")
        print(generation.summary.finish_reason)

It shows no protobuf type. A client does not survive a fork; connect in the child.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import grpc.aio

from baton.answer import ModelInfo
from baton.api_keys import ApiKey, refuse_plain_text
from baton.errors import InvalidRequest
from baton.generate_request import build_request
from baton.generation import Generation
from baton.routers import Routers
from baton.rpc import translate
from baton.telemetry import ROOT_SPAN, start_span
from baton.tls import opener_trusting
from baton.v1 import inference_service_pb2

DEFAULT_TARGET = "127.0.0.1:50051"


class AsyncClient:
    """A connection to the routers of one cluster. Made by `await AsyncClient.connect(target)`."""

    def __init__(self, routers: Routers) -> None:
        self._routers = routers
        self._rng = random.Random()

    @classmethod
    async def connect(
        cls,
        target: str | Sequence[str] = DEFAULT_TARGET,
        *,
        timeout_s: float = 10.0,
        tls_ca: str | os.PathLike[str] | None = None,
        api_key: str | None = None,
        insecure_key: bool = False,
    ) -> Self:
        """Connects to a router, or to the first of several that answers.

        An answer whose router is lost in the middle goes on at the next one, without a seam.
        tls_ca is a PEM file with the authority that signed the routers' certificates; None is for plain text.
        api_key says who is calling, to routers that tell tenants apart; every call carries it. Without TLS
        it goes to this machine only, unless insecure_key says that something else encrypts the way.
        Raises Unavailable if none answers within timeout_s seconds, ConfigError if tls_ca or api_key cannot
        be used.
        """
        targets = [target] if isinstance(target, str) else list(target)
        key = None if api_key is None else ApiKey(api_key)
        if key is not None and tls_ca is None and not insecure_key:
            refuse_plain_text(targets)
        return cls(await Routers.connect(targets, timeout_s, opener_trusting(tls_ca), key))

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Generation:
        """Starts one generation and returns it; iterate over it for the chunks.

            options = {"n": 2, "stop": "\\n\\n", "grammar": Grammar(kind="regex", source="[a-z ]+")}
            for answer in await client.generate("A word for it is", **options).answers():
                print(answer.text, answer.finish_reason)

        Args:
            prompt: text to continue. Exactly one of prompt, messages and token_ids is given.
            messages: a conversation, each message with "role" and "content".
            token_ids: a tokenized prompt.
            timeout_s: deadline for the whole answer, in seconds; None for none.
            options: as GenerateRequest in protos/baton/v1/inference_service.proto describes them.
                Sampling: max_tokens, min_tokens, temperature, top_k, top_p, min_p, seed, ignore_eos,
                stop_token_ids, allowed_token_ids, logit_bias (a mapping from token id to value),
                repetition_penalty, presence_penalty, frequency_penalty.
                Structure: grammar, a baton.Grammar.
                Text: stop (a text or several), include_stop_in_text, skip_special_tokens.
                Detail: n, logprobs, top_logprobs, prompt_logprobs.
                Service: priority ("low", "normal" or "high"), ttft_objective_ms.
                Others: model, truncate_prompt_tokens, request_id.

        Raises:
            InvalidRequest: an option or timeout_s is unknown or cannot be sent; the router's own
                refusals arrive while iterating.
        """
        if timeout_s is not None and not (isinstance(timeout_s, int | float) and timeout_s > 0):
            raise InvalidRequest("timeout_s must be a number of seconds above 0", field="timeout_s")
        request = build_request(prompt, messages, token_ids, options)
        return Generation(self._routers, request, start_span(ROOT_SPAN), timeout_s, self._rng)

    async def list_models(self, *, timeout_s: float = 10.0) -> list[ModelInfo]:
        """The models this cluster serves."""
        try:
            response = await self._routers.stub.ListModels(
                inference_service_pb2.ListModelsRequest(), timeout=timeout_s, metadata=self._routers.metadata
            )
        except grpc.aio.AioRpcError as error:
            raise translate(error) from None
        return [ModelInfo.from_proto(model) for model in response.models]

    async def close(self) -> None:
        """Ends all calls and the connection."""
        await self._routers.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
