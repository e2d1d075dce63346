"""Real processes under load while they are killed, stopped and cut off: nothing is lost.

Four series of faults run at once, one per role and one for the links that carry KV, each in an order
drawn from the seed, for about a minute.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from transformers import LlamaForCausalLM

from tests.integration.chaos_faults import series
from tests.integration.chaos_load import Case, Load, Record, ask, mixed_cases
from tests.integration.chaos_storm import Storm, format_rows, summary
from tests.integration.oracle import assert_greedy
from tests.integration.process_cluster import ROUTERS, WORKERS, ProcessCluster, process_cluster

RUNS = (
    ("disaggregated", 3),
    *(pytest.param("disaggregated", seed, marks=pytest.mark.long) for seed in (1, 2, 4, 5)),
    pytest.param("auto", 3, marks=pytest.mark.long),
)
WHOLE_WITHIN_S = 30.0
SETTLED_WITHIN_S = 5.0


@pytest_asyncio.fixture
async def cluster(
    tiny_model: tuple[Path, LlamaForCausalLM], tmp_path: Path, placement: str
) -> AsyncIterator[ProcessCluster]:
    async with process_cluster(tiny_model[0], tmp_path, placement) as started:
        yield started


@pytest.mark.parametrize(("placement", "seed"), RUNS)
async def test_every_answer_is_complete_whatever_dies(
    cluster: ProcessCluster, tiny_model: tuple[Path, LlamaForCausalLM], placement: str, seed: int
) -> None:
    # In "auto" no KV would move once decode workers had cached all prompts.
    load = Load(cluster.addresses, seed, has_new_prompts=placement == "auto")
    storm = Storm(cluster, load)
    drawn = series(random.Random(seed))
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run())
        await load.progress()
        begun_at = asyncio.get_running_loop().time()
        await storm.run(drawn)
        print(f"{asyncio.get_running_loop().time() - begun_at:.1f} s of chaos")
        load.is_stopped = True
    await cluster.wait_ready(WORKERS, WHOLE_WITHIN_S)
    afterwards = [await ask([address], case) for address in cluster.addresses for case in mixed_cases()[:4]]
    held = await held_in_the_end(cluster)

    rows = summary(storm.strikes, [*load.records, *afterwards], against(tiny_model[1]))
    print(format_rows(rows))
    print(f"the longest took {max(record.ended_at - record.asked_at for record in load.records):.1f} s")
    assert [(f.ended_at, f.failure.message) for f in load.records + afterwards if f.failure] == []
    assert [row for row in rows if row.failed or row.wrong] == []
    assert len(storm.strikes) == sum(map(len, drawn.values()))
    assert [row.kind for row in rows if not row.attempted] == []
    # Every process was asked; what none holds is no lease, no block, no request.
    assert held == {name: {} for name in (*ROUTERS, *WORKERS)}
    # Faults that break what is under way must have done so, or they prove nothing.
    assert {row.kind for row in rows if row.resumed} >= {"kill prefill", "kill decode", "kill router"}
    assert any(record.was_retried for record in load.records)
    assert any(record.was_moved for record in load.records)


async def held_in_the_end(cluster: ProcessCluster) -> dict[str, dict[str, int]]:
    """What each process still holds, once none holds anything or the time for it is over."""
    deadline = asyncio.get_running_loop().time() + SETTLED_WITHIN_S
    while True:
        held = {
            name: {what: count for what, count in counts.items() if count}
            for name, counts in (await cluster.ledgers()).items()
        }
        if not any(held.values()) or asyncio.get_running_loop().time() > deadline:
            return held
        await asyncio.sleep(0.02)


def against(model: LlamaForCausalLM) -> Callable[[Record], bool]:
    """Whether an answer is transformers' own; equal answers are compared once."""
    known: dict[tuple[Case, tuple[int, ...]], bool] = {}

    def is_right(record: Record) -> bool:
        key = record.case, record.tokens
        if key not in known:
            known[key] = _is_greedy(model, record)
        return known[key]

    return is_right


def _is_greedy(model: LlamaForCausalLM, record: Record) -> bool:
    prompt, max_tokens = record.case
    if len(record.tokens) != max_tokens:
        return False
    try:
        assert_greedy(model, list(prompt), record.tokens)
    except AssertionError as error:
        print(error)
        return False
    return True
