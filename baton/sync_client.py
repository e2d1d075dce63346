"""The thin synchronous face of the client: the same calls, from code without an event loop.

    from baton import Client

    with Client.connect("127.0.0.1:50051") as client:
        for chunk in client.generate("The capital of France is", max_tokens=16):
            print(chunk.text, end="")

Everything happens in AsyncClient, on an event loop in a thread of its own.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from baton.answer import Answer, Chunk, ModelInfo, PromptToken, Summary
from baton.client import DEFAULT_TARGET, AsyncClient
from baton.generation import Generation as AsyncGeneration

T = TypeVar("T")


class Client:
    """A connection to one router. Made by `Client.connect(target)`; used by one thread at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="baton-client", daemon=True)
        self._thread.start()
        self._client: AsyncClient | None = None

    @classmethod
    def connect(
        cls,
        target: str | Sequence[str] = DEFAULT_TARGET,
        *,
        timeout_s: float = 10.0,
        tls_ca: str | os.PathLike[str] | None = None,
        api_key: str | None = None,
        insecure_key: bool = False,
    ) -> Self:
        """Connects to a router; as AsyncClient.connect()."""
        client = cls()
        try:
            client._client = client._run(
                AsyncClient.connect(
                    target,
                    timeout_s=timeout_s,
                    tls_ca=tls_ca,
                    api_key=api_key,
                    insecure_key=insecure_key,
                )
            )
        except BaseException:
            client.close()
            raise
        return client

    def generate(self, prompt: str | None = None, **options: Any) -> Generation:
        """Starts one generation; as AsyncClient.generate()."""

        async def start() -> AsyncGeneration:
            assert self._client is not None
            return self._client.generate(prompt, **options)

        return Generation(self._run, self._run(start()))

    def list_models(self, *, timeout_s: float = 10.0) -> list[ModelInfo]:
        """The models this cluster serves."""
        assert self._client is not None
        return self._run(self._client.list_models(timeout_s=timeout_s))

    def close(self) -> None:
        """Ends all calls, the connection and the thread; idempotent."""
        if self._loop.is_closed():
            return
        if self._client is not None:
            self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class Generation:
    """The answers to one prompt as they arrive; iterate once."""

    def __init__(self, run: Any, generation: AsyncGeneration) -> None:
        self._run = run
        self._generation = generation

    @property
    def summary(self) -> Summary:
        """How the generation went; there once the iteration has ended."""
        return self._generation.summary

    @property
    def prompt_logprobs(self) -> list[PromptToken | None]:
        """The prompt's tokens; as the asynchronous Generation's."""
        return self._generation.prompt_logprobs

    def __iter__(self) -> Iterator[Chunk]:
        """The chunks; leaving the loop early cancels the generation."""
        chunks = aiter(self._generation)
        end = object()

        async def step() -> Any:
            return await anext(chunks, end)

        try:
            while (chunk := self._run(step())) is not end:
                yield chunk
        finally:
            self.cancel()

    def text(self) -> str:
        """The text of the first answer, once all are there."""
        return self.answers()[0].text

    def answers(self) -> list[Answer]:
        """The whole answers by index, once all are there."""
        chunks = list(self)
        return [Answer.join(choice, chunks) for choice in self.summary.choices]

    def cancel(self) -> None:
        """Ends the generation everywhere; idempotent."""

        async def end() -> None:
            self._generation.cancel()

        self._run(end())
