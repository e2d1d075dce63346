"""10,000 random transfers: no wrong byte, no leak, no hang, and nothing fails without a reason.

Most run in memory on virtual time, where a killed or stopped process is what it is; the rest over real
servers, through streams and slots. A storm that did not do all it should proves nothing, so what
happened is counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtransfer.contract import Gone, GoneReason
from kvtransfer.transports.nixl import is_installed
from tests.kvtransfer.faults import FAULTS
from tests.kvtransfer.storm import Storm, StormSpec
from tests.kvtransfer.storm_attempt import Rules
from tests.kvtransfer.storm_memory import storm_in_memory
from tests.kvtransfer.storm_sender import DTYPES
from tests.kvtransfer.storm_wire import storm_over

NUM_IN_MEMORY = 8_550
SEEDS = range(1, 10)
WIRE = Rules(pace_s=0.0005, attempt_s=0.02, ttl_s=3.0, stall_timeout_s=0.6, stall_share=0.1, hang_s=20.0)
# Twelve writes at once in one process, and NIXL's own threads beside them.
NIXL = Rules(pace_s=0.0005, attempt_s=0.05, ttl_s=5.0, stall_timeout_s=1.0, hang_s=20.0)
SLOT_EVENTS = ("writes_without_slots", "quarantined_writes")


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    """Transfers that fail are the purpose here."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(disabled)


@pytest.fixture(scope="module")
def memory_storms() -> list[Storm]:
    """One storm per seed; the first that fails is the last."""
    storms: list[Storm] = []
    for seed in SEEDS:
        storms.append(storm_in_memory(StormSpec(seed=seed, num_transfers=NUM_IN_MEMORY // len(SEEDS))))
        if storms[-1].defects:
            break
    return storms


@pytest.fixture(scope="module")
def memory_counts(memory_storms: list[Storm]) -> Counter[str]:
    """What happened in all of them."""
    return sum((storm.counts for storm in memory_storms), Counter())


def test_no_wrong_byte_no_leak_no_hang_in_memory(memory_storms: list[Storm]) -> None:
    defects = {seed: storm.defects[:5] for seed, storm in zip(SEEDS, memory_storms, strict=False)}
    assert {seed: found for seed, found in defects.items() if found} == {}
    assert sum(storm.counts["transfers"] for storm in memory_storms) == NUM_IN_MEMORY


@pytest.mark.parametrize(
    "event",
    [
        *FAULTS,
        "cancelled reserved",
        "cancelled receiving",
        "cancelled committed",
        "sender left",
        "both left",
        "expired",
        "resume",
        "same lease again",
        "death of a sender",
        "death of a receiver",
        "pause",
        "refused",
        "by layers",
        "staged_frames",
        "cache_frames",
        "overtaken_frames",
        "committed with held tokens",
        "everything held",
        "16 -> 32 tokens",
        "32 -> 16 tokens",
        "HND -> NHD",
        "NHD -> HND",
        *(f"{theirs} -> {ours}" for theirs in DTYPES for ours in DTYPES),
    ],
)
def test_everything_has_happened_often_in_memory(memory_counts: Counter[str], event: str) -> None:
    assert memory_counts[event] >= 50


def test_most_transfers_commit_in_the_end(memory_counts: Counter[str]) -> None:
    assert memory_counts["committed"] >= 0.9 * NUM_IN_MEMORY
    assert memory_counts[f"told {Gone(GoneReason.CORRUPT)}"] >= 30


EVERY_EVENT = {*FAULTS, "sender left", "both left", "resume", "cancelled receiving", "death of a sender"}


@pytest.mark.parametrize(
    ("transport", "spec", "events"),
    [
        pytest.param(
            "grpc",
            StormSpec(seed=17, num_transfers=1_000, deaths_every=60, rules=WIRE),
            EVERY_EVENT,
            id="grpc",
        ),
        pytest.param(
            "shm", StormSpec(seed=17, num_transfers=300, rules=WIRE), {*FAULTS[:4], *SLOT_EVENTS}, id="shm"
        ),
        pytest.param(
            "nixl",
            StormSpec(seed=17, num_transfers=150, deaths_every=50, rules=NIXL),
            {*FAULTS[:4]},
            id="nixl",
            marks=pytest.mark.skipif(not is_installed(), reason="nixl is not installed"),
        ),
    ],
)
async def test_no_wrong_byte_no_leak_no_hang_over_real_servers(
    transport: str, spec: StormSpec, events: set[str], tmp_path: Path
) -> None:
    storm = await storm_over(transport, spec, tmp_path)
    assert storm.defects[:5] == []
    assert storm.counts["transfers"] == spec.num_transfers
    assert storm.counts["committed"] >= 0.8 * spec.num_transfers
    assert {event for event in events if not storm.counts[event]} == set()
    assert {key for key in storm.counts if key.startswith("paired by")} == {f"paired by {transport}"}
