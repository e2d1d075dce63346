"""Bugs put back on purpose: each is one small patch of the product, with the reason it would hurt.

The simulation must catch every one of them; a mutant that survives shows a hole in the
laws or in the faults. A patch lives as long as its context.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One bug. reason: what it would do to a user; seed: one that is known to catch it."""

    name: str
    reason: str
    seed: int
    apply: Callable[[], AbstractContextManager[Any]]


Make = Callable[[], Any]


def registering(mutants: list[Mutant]) -> Callable[..., Callable[[Make], Make]]:
    """A decorator for functions that return a patch, mutant(reason, seed=0), which adds to the list."""

    def mutant(reason: str, *, seed: int = 0) -> Callable[[Make], Make]:
        def register(make: Make) -> Make:
            mutants.append(Mutant(name=make.__name__, reason=reason, seed=seed, apply=make))
            return make

        return register

    return mutant
