"""What a worker's log says while it loads, and that `baton up` can read it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from baton.cluster.start_news import INTERVAL_S, StartNews
from baton.logs import configure_logging
from baton.models import ModelDir
from engine.config import EngineConfig
from engine.engine import Engine
from engine.load_log import LoadLog
from tests.engine.tiny_models import Reference


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Path]:
    """A folder in which this process logs as prefill-0."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    # Emptied first, so that configure_logging() does not close pytest's own handlers.
    root.handlers[:] = []
    configure_logging("prefill-0", file=tmp_path / "prefill-0.log")
    yield tmp_path
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def told(logs: Path) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (logs / "prefill-0.log").read_text().splitlines()]
    common = {"role", "level", "logger", "time"}
    return [{key: value for key, value in entry.items() if key not in common} for entry in entries]


def test_at_most_one_line_a_second_and_one_at_the_end(logs: Path) -> None:
    clock = Clock()
    progress = LoadLog(clock)
    for step in range(1, 11):
        clock.now_s += 0.3
        progress(step * 50, 500)
    progress.finish(dtype="bfloat16")

    assert told(logs) == [
        {"event": "loading weights", "percent": 40, "bytes_read": 200, "total_bytes": 500},
        {"event": "loading weights", "percent": 80, "bytes_read": 400, "total_bytes": 500},
        {"event": "weights loaded", "bytes_read": 500, "seconds": 3.0, "dtype": "bfloat16"},
    ]


def test_baton_up_reads_how_far_it_is(logs: Path) -> None:
    clock, news = Clock(), StartNews(logs, 0.0)
    progress = LoadLog(clock)
    clock.now_s += 5.0
    progress(379, 1000)

    line = news.line(frozenset({"prefill-0"}), INTERVAL_S)

    assert line == "waiting for prefill-0 (loading weights, 37 %)"


async def test_an_engine_tells_what_it_has_loaded(logs: Path, reference_model: Reference) -> None:
    folder, reference = reference_model()
    engine = await Engine.start(
        EngineConfig(model=str(folder), kv_cache_bytes=1 << 20), ModelDir.open(folder)
    )
    await engine.close()

    (line,) = [entry for entry in told(logs) if entry["event"] == "weights loaded"]
    # fp32; the head is the embedding and is stored once.
    num_bytes = 4 * sum(parameter.numel() for parameter in reference.parameters())
    assert (line["bytes_read"], line["dtype"]) == (num_bytes, "float32")
