"""A prefill worker from its model to its end: what was loaded is closed, whatever goes wrong."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.models import ModelDir
from kvtransfer.event_thread import EventThread
from prefill_worker import serve
from prefill_worker.config import PrefillConfig
from tests.fakes import FINGERPRINT


async def test_the_engine_is_closed_where_what_follows_it_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed, staged = [], []

    async def stage_kv(max_tokens: int) -> None:
        staged.append(max_tokens)

    async def close() -> None:
        closed.append(True)

    async def start(*_: Any) -> Any:
        return SimpleNamespace(close=close, cache=None, kernel_choices=None, stage_kv=stage_kv)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(ModelDir, "open", lambda _: SimpleNamespace(fingerprint=lambda: FINGERPRINT))
    monkeypatch.setattr(serve.Engine, "start", start)
    monkeypatch.setattr(serve, "reader_of", fail)
    with pytest.raises(OSError, match="no space left"):
        await serve.serve(PrefillConfig(model="any", max_batch_tokens=96), asyncio.Event())
    assert (closed, staged) == ([True], [96])
    with pytest.raises(OSError, match="no space left"):
        await serve.serve(PrefillConfig(model="any", kv_staging=False), asyncio.Event())
    assert (closed, staged) == ([True, True], [96])


async def test_the_sender_has_a_thread_that_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    async def close() -> None:
        pass

    async def start(*_: Any) -> Any:
        cache = SimpleNamespace(device=torch.device("cpu"))
        return SimpleNamespace(close=close, cache=cache, kernel_choices=None)

    def fail(*_: Any, **options: Any) -> None:
        made.append(options["events"])
        raise OSError("no space left")

    monkeypatch.setattr(ModelDir, "open", lambda _: SimpleNamespace(fingerprint=lambda: FINGERPRINT))
    monkeypatch.setattr(serve.Engine, "start", start)
    monkeypatch.setattr(serve, "reader_of", lambda *_: SimpleNamespace(format=None, memory=None))
    monkeypatch.setattr(serve, "KvClient", lambda *_, **__: None)
    monkeypatch.setattr(serve, "KvSender", fail)
    with pytest.raises(OSError, match="no space left"):
        await serve.serve(PrefillConfig(model="any", kv_staging=False), asyncio.Event())
    assert [type(events) for events in made] == [EventThread]
    made[0].close()
