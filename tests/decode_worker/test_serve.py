"""A decode worker from its model to its end: what was loaded is closed, whatever goes wrong."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from baton.models import ModelDir
from decode_worker import serve
from decode_worker.config import DecodeConfig
from tests.fakes import FINGERPRINT


async def test_the_engine_is_closed_where_what_follows_it_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = []

    async def close() -> None:
        closed.append(True)

    async def start(*_: Any) -> Any:
        return SimpleNamespace(close=close, cache=None)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(ModelDir, "open", lambda _: SimpleNamespace(fingerprint=lambda: FINGERPRINT))
    monkeypatch.setattr(serve.Engine, "start", start)
    monkeypatch.setattr(serve.Arena, "of_size", fail)
    with pytest.raises(OSError, match="no space left"):
        await serve.serve(DecodeConfig(model="any"), asyncio.Event())
    assert closed == [True]


async def test_kernels_of_transfers_are_compiled_before_anybody_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = []

    async def start(*_: Any) -> Any:
        async def close() -> None:
            done.append("close")

        return SimpleNamespace(close=close)

    async def serve_worker(*_: Any, **__: Any) -> None:
        done.append("serve")

    worker = SimpleNamespace(
        receiver=SimpleNamespace(warm_up=lambda: done.append("warm up")),
        reachable_at=None,
        transfers=SimpleNamespace(add_to=None),
    )
    monkeypatch.setattr(ModelDir, "open", lambda _: SimpleNamespace(fingerprint=lambda: FINGERPRINT))
    monkeypatch.setattr(serve.Engine, "start", start)
    monkeypatch.setattr(serve, "_worker", lambda *_: worker)
    monkeypatch.setattr(serve, "serve_worker", serve_worker)
    await serve.serve(DecodeConfig(model="any", arena_bytes=0), asyncio.Event())
    assert done == ["warm up", "serve", "close"]
