"""Every mutant is caught by the simulation; without one, the same seeds pass."""

from __future__ import annotations

import pytest

from tests.mutants.mutants import MUTANTS, Mutant
from tests.simulation.plan import draw
from tests.simulation.run import run

MAX_SEEDS = 300


def first_seed_that_fails() -> int | None:
    return next((seed for seed in range(MAX_SEEDS) if run(draw(seed)).defects), None)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_simulation_catches(mutant: Mutant) -> None:
    with mutant.apply():
        seed = first_seed_that_fails()
    assert seed is not None, f"{mutant.name} survives {MAX_SEEDS} seeds: {mutant.reason}"
    print(f"{mutant.name}: seed {seed}")


def test_there_are_enough_mutants_and_each_has_a_name() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names)) >= 15
