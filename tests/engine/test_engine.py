"""The start and the end of an engine."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from baton.models import ModelDir
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.compiled import Compilation
from engine.runner import ModelRunner
from tests.engine.tiny_models import Reference


@dataclass
class Closing:
    """A thread that ends once all others have been told to."""

    all_told: asyncio.Barrier
    timeouts_s: list[float] = field(default_factory=list)

    async def close(self, timeout_s: float) -> None:
        self.timeouts_s.append(timeout_s)
        await self.all_told.wait()


async def test_its_threads_are_closed_beside_each_other() -> None:
    both: Any = asyncio.Barrier(2)
    thread, masks, unused = Closing(both), Closing(both), object()
    parts: dict[str, Any] = {"runner": thread, "mask_pool": masks}
    engine = Engine(**parts, cache=unused, pool=unused, scheduler=unused)  # type: ignore[arg-type]
    async with asyncio.timeout(10):
        await engine.close(3.0)
    assert thread.timeouts_s == masks.timeouts_s == [3.0]


@pytest.mark.parametrize(
    ("compiled", "said"),
    [
        (Compilation(num_programs=4, is_cached=False), [{"cached": "no", "programs": 4}]),
        (Compilation(num_programs=4, is_cached=True), [{"cached": "yes", "programs": 4}]),
        (None, []),
    ],
)
async def test_it_compiles_before_it_warms_up_and_says_what_that_came_to(
    reference_model: Reference,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    compiled: Compilation | None,
    said: list[dict[str, object]],
) -> None:
    folder, _ = reference_model()
    calls: list[str] = []
    warm_up = ModelRunner.warm_up
    monkeypatch.setattr(ModelRunner, "compile", lambda _: calls.append("compile") or compiled)
    monkeypatch.setattr(ModelRunner, "warm_up", lambda runner: calls.append("warm up") or warm_up(runner))
    caplog.set_level(logging.INFO)

    engine = await Engine.start(
        EngineConfig(compile=True, kv_cache_bytes=1 << 20), ModelDir.open(str(folder))
    )
    await engine.close()

    lines = lines_of(caplog)
    assert calls == ["compile", "warm up"]
    assert [{key: line[key] for key in ("cached", "programs")} for line in lines["layers compiled"]] == said
    assert all(line["seconds"] >= 0 for line in lines["layers compiled"])
    assert len(lines["engine ready"]) == 1


async def test_it_tells_its_start_up_time_and_compiles_nothing_unasked(
    reference_model: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = reference_model()
    caplog.set_level(logging.INFO)

    engine = await Engine.start(EngineConfig(kv_cache_bytes=1 << 20), ModelDir.open(str(folder)))
    await engine.close()

    lines = lines_of(caplog)
    (loaded,), (ready,) = lines["weights loaded"], lines["engine ready"]
    assert 0 <= loaded["seconds"] <= ready["seconds"]
    assert not lines["compiling layers"]


@pytest.mark.parametrize(
    ("kernels", "device", "staged"),
    [("triton", "cuda", [("engine", 96)]), ("triton", "cpu", []), ("torch", "cuda", [])],
)
async def test_kv_is_staged_where_kernels_run_on_a_gpu_on_the_thread_of_the_steps(
    reference_model: Reference,
    monkeypatch: pytest.MonkeyPatch,
    kernels: str,
    device: str,
    staged: list[tuple[str, int]],
) -> None:
    folder, _ = reference_model()
    config = EngineConfig(kernels=kernels, kv_cache_bytes=1 << 20)
    engine = await Engine.start(config, ModelDir.open(str(folder)))
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(
        ModelRunner, "stage", lambda _, tokens: calls.append((threading.current_thread().name, tokens))
    )
    engine.cache.device = torch.device(device)

    await engine.stage_kv(96)

    assert calls == staged
    assert (engine.kernel_choices is None) == (kernels == "torch")
    await engine.close()


def lines_of(caplog: pytest.LogCaptureFixture) -> dict[str, list[dict[str, Any]]]:
    """The lines of the log by their event."""
    lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in caplog.records:
        if isinstance(record.msg, dict):
            lines[record.msg["event"]].append(record.msg)
    return lines
