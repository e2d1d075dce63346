"""Every mutant is caught by the simulation within 300 seeds; without one, the same seeds pass."""

from __future__ import annotations

import pytest

from tests.mutants.mutants import MUTANTS, Mutant
from tests.simulation.plan import draw
from tests.simulation.run import run

MAX_SEEDS = 300


def first_seed_that_fails(known: int) -> int | None:
    return next((seed for seed in (known, *range(MAX_SEEDS)) if run(draw(seed)).defects), None)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_simulation_catches(mutant: Mutant) -> None:
    with mutant.apply():
        seed = first_seed_that_fails(mutant.seed)
    assert seed is not None, f"{mutant.name} survives {MAX_SEEDS} seeds: {mutant.reason}"
    print(f"{mutant.name}: seed {seed}")


@pytest.mark.parametrize("seed", sorted({mutant.seed for mutant in MUTANTS}))
def test_without_a_mutant_the_same_seed_passes(seed: int) -> None:
    assert not run(draw(seed)).defects


def test_there_are_enough_mutants_and_each_has_a_name() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names)) >= 15
