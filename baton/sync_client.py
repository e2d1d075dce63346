"""The thin synchronous face of the client: the same calls, from code without an event loop.

    >>> from baton import Client
    >>> with Client.connect("127.0.0.1:50051") as client:
    ...     for chunk in client.generate("The capital of France is", max_tokens=16):
    ...         print(chunk.text, end="")
     Paris.

Everything happens in AsyncClient, on an event loop in a thread of its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc.aio

from baton.answer import Answer, Chunk, ModelInfo, PromptToken, Summary
from baton.chat_messages import Message
from baton.client import AsyncClient
from baton.client_tls import TlsConfig
from baton.errors import Cancelled
from baton.generation import Generation as AsyncGeneration
from baton.retry import DEFAULT_RETRY, Retry
from baton.routers import refuse_fork
from baton.structured import SchemaT

T = TypeVar("T")


class Client:
    """A connection to the routers of one cluster. Made by `Client.connect(target)`; threads may share it."""

    def __init__(self) -> None:
        self._process_id = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="baton-client", daemon=True)
        self._thread.start()
        self._client: AsyncClient | None = None
        # Work that came after the end would wait for ever.
        self._lock = threading.Lock()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} over {self._client!r}>"

    @classmethod
    def connect(
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
        """Connects to a router; arguments and errors are those of AsyncClient.connect()."""
        client = cls()
        connecting = AsyncClient.connect(
            target,
            api_key=api_key,
            tls=tls,
            tls_ca=tls_ca,
            insecure_key=insecure_key,
            lazy=lazy,
            timeout_s=timeout_s,
            retry=retry,
            interceptors=interceptors,
        )
        try:
            client._client = client._run(connecting)
        except BaseException:
            client.close()
            raise
        return client

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Generation:
        """Starts one generation; arguments and errors are those of AsyncClient.generate()."""

        async def start() -> AsyncGeneration:
            return self._connected.generate(
                prompt, messages=messages, token_ids=token_ids, timeout_s=timeout_s, **options
            )

        return Generation(self._run, self._run(start()))

    def chat(
        self, messages: str | Sequence[Message], *, timeout_s: float | None = None, **options: Any
    ) -> Generation:
        """Starts the next answer of a conversation; arguments and errors are those of AsyncClient.chat()."""

        async def start() -> AsyncGeneration:
            return self._connected.chat(messages, timeout_s=timeout_s, **options)

        return Generation(self._run, self._run(start()))

    def parse(
        self,
        cls: type[SchemaT],
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> SchemaT:
        """An answer as a value of a class; arguments and errors are those of AsyncClient.parse()."""
        parsing = self._connected.parse(
            cls, prompt, messages=messages, token_ids=token_ids, timeout_s=timeout_s, **options
        )
        return self._run(parsing)

    def list_models(self, *, timeout_s: float = 10.0) -> list[ModelInfo]:
        """The models this cluster serves; errors are those of AsyncClient.list_models()."""
        return self._run(self._connected.list_models(timeout_s=timeout_s))

    def close(self) -> None:
        """Ends all calls, whichever thread waits for them, the connection and the thread; idempotent.

        A fork of the process that connected has nothing to close.
        """
        if os.getpid() != self._process_id:
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        ending.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _connected(self) -> AsyncClient:
        assert self._client is not None
        return self._client

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            # Before the lock, which a thread may have held that is not here any more.
            refuse_fork(self._process_id)
        except RuntimeError:
            work.close()
            raise
        with self._lock:
            if self._is_closed:
                work.close()
                raise Cancelled("the client is closed")
            running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        except concurrent.futures.CancelledError:
            raise Cancelled("the client was closed") from None
        except KeyboardInterrupt:
            running.cancel()
            raise

    async def _end(self) -> None:
        if self._client is not None:
            await self._client.close()
        # What the others wait for has ended now; those that do not know it yet are told.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)
        await self._loop.shutdown_asyncgens()


class Generation:
    """The answers to one prompt as they arrive, kept as by the asynchronous one.

    cancel() may come from another thread.
    """

    def __init__(self, run: Callable[[Coroutine[Any, Any, Any]], Any], generation: AsyncGeneration) -> None:
        self._run = run
        self._generation = generation

    def __repr__(self) -> str:
        return repr(self._generation)

    @property
    def request_id(self) -> str:
        """Its name in logs and traces; as the asynchronous Generation's."""
        return self._generation.request_id

    @property
    def summary(self) -> Summary:
        """How the generation went; there once the iteration has ended."""
        return self._generation.summary

    @property
    def prompt_logprobs(self) -> list[PromptToken | None]:
        """The prompt's tokens; as the asynchronous Generation's."""
        return self._generation.prompt_logprobs

    def __iter__(self) -> Iterator[Chunk]:
        """The chunks; leaving the loop early cancels the generation. Raises as the asynchronous one."""
        chunks = self._generation.__aiter__()
        end = object()

        async def step() -> Any:
            return await anext(chunks, end)

        async def leave() -> None:
            # Ends the generation, unless it is another's to read. A step that an interrupt left ends it too.
            with suppress(RuntimeError):
                await chunks.aclose()

        try:
            while (chunk := self._run(step())) is not end:
                yield chunk
        finally:
            # A client that is closed has ended its generations.
            with suppress(Cancelled):
                self._run(leave())

    def text(self) -> str:
        """The text of the first answer, once all are there; raises as the iteration does."""
        return self.answers()[0].text

    def answers(self) -> list[Answer]:
        """The whole answers by index, once all are there; raises as the iteration does."""
        return self.known_answers() or self._run(self._generation.answers())

    def known_answers(self) -> list[Answer]:
        """The whole answers by index, if all are there already; otherwise an empty list."""
        return self._generation.known_answers()

    def cancel(self) -> None:
        """Ends the generation everywhere; idempotent, harmless after the end, also from another thread."""

        async def end() -> None:
            self._generation.cancel()

        # A client that is closed has ended its generations.
        with suppress(Cancelled):
            self._run(end())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
