"""One request is one trace across SDK, router and both workers, with spans named after the statuses."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from baton import AsyncClient
from baton.cluster.local_cluster import LocalCluster
from baton.telemetry import configure_tracing, shutdown_tracing

PROMPT = "a canary sings in the coal mine"
PARENTS = {
    ("baton-client", "generate"): None,
    ("baton-router", "generate"): ("baton-client", "generate"),
    ("baton-router", "QUEUED"): ("baton-router", "generate"),
    ("baton-prefill", "PREFILLING"): ("baton-router", "generate"),
    ("baton-prefill", "TRANSFERRING"): ("baton-router", "generate"),
    ("baton-decode", "DECODING"): ("baton-router", "generate"),
}


@pytest.mark.asyncio(loop_scope="session")
async def test_one_trace(tiny_cluster: LocalCluster, tiny_client: AsyncClient) -> None:
    path = Path(tiny_cluster.config.trace_file)
    known = len(path.read_text().splitlines())
    configure_tracing("baton-client", "test", str(path))
    try:
        generation = tiny_client.generate(PROMPT, max_tokens=5, ignore_eos=True)
        await generation.text()
    finally:
        shutdown_tracing()
    spans = await _spans(path, known, len(PARENTS))
    by_id = {span["span_id"]: (span["service"], span["name"]) for span in spans}
    assert len({span["trace_id"] for span in spans}) == 1
    assert {by_id[s["span_id"]]: by_id.get(s["parent_id"]) for s in spans} == PARENTS
    assert all(span["start_unix_ns"] <= span["end_unix_ns"] for span in spans)
    assert PROMPT not in path.read_text()
    assert PROMPT not in "".join(log.read_text() for log in tiny_cluster.log_dir.iterdir())


async def _spans(path: Path, known: int, wanted: int) -> list[dict[str, Any]]:
    """The spans written since; the workers' last ones may come after the client's end."""
    async with asyncio.timeout(5.0):
        while len(lines := path.read_text().splitlines()[known:]) < wanted:
            await asyncio.sleep(0.02)
    return [json.loads(line) for line in lines]
