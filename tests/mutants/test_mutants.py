"""Every mutant is caught by the simulation within 300 seeds; without one, the same seeds pass."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import pytest

from tests.mutants.hunt import MAX_SEEDS, MUTANTS, defects_of, hunt
from tests.mutants.mutant import Mutant
from tests.simulation.seeds import process_pool

KNOWN_SEEDS = sorted({mutant.seed for mutant in MUTANTS})


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with process_pool() as processes:
        yield processes


@pytest.fixture(scope="module")
def hunts(
    pool: ProcessPoolExecutor, request: pytest.FixtureRequest
) -> dict[str, Future[tuple[int, str] | None]]:
    """The hunts of all mutants that this session asks for, all begun at once."""
    chosen = [
        item.callspec.params.get("mutant") for item in request.session.items if hasattr(item, "callspec")
    ]
    return {mutant.name: pool.submit(hunt, mutant.name) for mutant in MUTANTS if mutant in chosen}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_simulation_catches(mutant: Mutant, hunts: dict[str, Future[tuple[int, str] | None]]) -> None:
    caught = hunts[mutant.name].result()
    assert caught is not None, f"{mutant.name} survives {MAX_SEEDS} seeds: {mutant.reason}"
    seed, defect = caught
    print(f"{mutant.name}: seed {seed}: {defect[:160]}")


@pytest.mark.timeout(900)
def test_without_a_mutant_the_same_seeds_pass(pool: ProcessPoolExecutor) -> None:
    found = dict(zip(KNOWN_SEEDS, pool.map(defects_of, KNOWN_SEEDS), strict=True))
    assert not {seed: defects for seed, defects in found.items() if defects}


def test_there_are_enough_mutants_and_each_has_a_name() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names)) >= 50
