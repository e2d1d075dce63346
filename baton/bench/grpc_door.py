"""A cluster under load by gRPC, through the SDK."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from baton.bench.outcome import Planned
from baton.client import AsyncClient


class ClusterTarget:
    """A cluster's routers, asked through the SDK."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def answer(self, request: Planned, timeout_s: float) -> AsyncGenerator[int, None]:
        """One greedy answer that no stop token ends."""
        generation = self._client.generate(
            token_ids=request.token_ids,
            max_tokens=request.max_tokens,
            temperature=0.0,
            ignore_eos=True,
            timeout_s=timeout_s,
        )
        async for chunk in generation:
            if chunk.token_ids:
                yield len(chunk.token_ids)
