"""The router's benchmark without its figures: both sides answer all requests, and nothing is left."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.child import Child
from benchmarks.report import Row
from benchmarks.router_cost import Scale, Side
from benchmarks.router_decision import decisions
from benchmarks.router_load import LoadProcess, LoadSpec
from benchmarks.router_rig import Rig, spending
from benchmarks.sim_costs import SimCosts

NUM_REQUESTS, NUM_TOKENS = 6, 5


async def test_a_router_and_the_control_answer_every_request(tmp_path: Path) -> None:
    load = LoadProcess()
    try:
        async with (
            Rig.open(tmp_path) as rig,
            rig.cluster(1, costs=SimCosts(decode_step_ms=2.0), num_relayed=1) as cluster,
        ):
            assert cluster.relay is not None
            for address in (cluster.address, cluster.relay.address):
                spec = LoadSpec(
                    address=address, num_requests=NUM_REQUESTS, concurrency=3, max_tokens=NUM_TOKENS
                )
                result = load.run(spec)
                assert (result.num_requests, result.num_tokens) == (NUM_REQUESTS, NUM_REQUESTS * NUM_TOKENS)
                assert min(result.ttft_ms) > 0
            counts = rig.sims.counts(cluster.namespace)
            # A prompt at a prefill worker is a first token; all others are the decode worker's.
            assert (counts["prefill_attempts"], counts["decode_attempts"], counts["used_blocks"]) == (0, 0, 0)
            made = 2 * NUM_REQUESTS * NUM_TOKENS
            assert counts["tokens"] + counts["prompts"] == made
    finally:
        load.close()


def test_spending_counts_another_process() -> None:
    child = Child(burn)
    try:
        child.hear()
        with spending(child.ask("pid")) as spent:
            reported_s = child.ask("burn")
    finally:
        child.close()
    # The process's own clock: all its threads, and little beside what it burnt.
    assert reported_s <= spent.cpu_s < reported_s + 0.1


def burn(pipe: Connection) -> None:
    """Says its process id when asked, then burns 50 ms of processor time and says how much it was."""
    pipe.send("ready")
    pipe.recv()
    pipe.send(os.getpid())
    pipe.recv()
    began = time.process_time()
    while time.process_time() < began + 0.05:
        pass
    pipe.send(time.process_time() - began)


async def test_every_decision_is_timed() -> None:
    found = await decisions(4, 30)
    assert len(found.times_us) == 30
    assert min(found.times_us) > 0


def side(name: str, request_us: float, token_us: float) -> Side:
    made = Side(name, 64, 1, "127.0.0.1:1", idle_us=640.0, num_tokens=10, num_chunks=10)
    made.request_us, made.token_us = [request_us], [token_us]
    made.one_ms, made.busy_ms = [1.0], [2.0]
    return made


def test_rows_compare_with_budget_control_and_one_worker() -> None:
    scale = Scale(side("router", 1_000.0, 90.0), side("bare relay", 500.0, 45.0))
    base = Scale(side("router", 800.0, 80.0), side("bare relay", 500.0, 45.0))
    scale.compared(base)
    rows: dict[str, Row] = {row.metric: row for row in scale.rows()}
    assert rows["CPU per request, 64 workers"].ratio == 1.5
    assert rows["CPU per token, 64 workers"].ratio == 0.5
    assert rows["flatness, 64 workers"].ratio == 0.8
    assert rows["idle CPU per worker, 64 workers"].ours == 10.0
    assert rows["added latency p50 x1, 64 workers"].ratio == 2.0
