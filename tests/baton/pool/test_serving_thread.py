"""A worker's thread inside an actor, without Ray. It is never started here: its end is the process's."""

from __future__ import annotations

import asyncio

import pytest

from baton.pool import serving_thread
from baton.pool.serving_thread import ServingThread
from tests.idle_role import DecodeWorker, IdleConfig


def test_a_call_that_waits_for_the_end_comes_back() -> None:
    assert ServingThread(DecodeWorker.role, IdleConfig()).wait_ended(0.0) is False


async def test_metrics_that_fail_are_told_and_do_not_spoil_the_drain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no such metric")

    monkeypatch.setattr(serving_thread, "ActorMetrics", fail)
    thread = ServingThread(DecodeWorker.role, IdleConfig())
    serving = asyncio.create_task(thread._serve())
    async with asyncio.timeout(10):
        while not caplog.records:
            await asyncio.sleep(0)
    thread._stop.set()
    await serving
    assert [record.msg["event"] for record in caplog.records] == ["metrics failed"]
