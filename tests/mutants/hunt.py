"""Looks for a seed that catches a mutant; what a process of the pool is given to do."""

from __future__ import annotations

from tests.mutants import drain_mutants, mutants, rope_mutants, router_mutants
from tests.simulation.plan import draw
from tests.simulation.run import run

MUTANTS = (*mutants.MUTANTS, *router_mutants.MUTANTS, *drain_mutants.MUTANTS, *rope_mutants.MUTANTS)
MAX_SEEDS = 300


def hunt(name: str) -> tuple[int, str] | None:
    """(seed, defect) of the first of the known seed and all below MAX_SEEDS that fails; None if none does."""
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    with mutant.apply():
        for seed in (mutant.seed, *range(MAX_SEEDS)):
            defects = run(draw(seed)).defects
            if defects:
                return seed, defects[0]
    return None


def defects_of(seed: int) -> tuple[str, ...]:
    """What is wrong with a seed as it is."""
    return run(draw(seed)).defects
