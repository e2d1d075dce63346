"""Bugs of scale steps: KV of one scale of the model's positions where that of another is due."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from engine import batch_builder, block_tables
from engine.scheduler import Scheduler
from router import generation
from tests.mutants.mutant import Mutant, registering

MUTANTS: list[Mutant] = []
mutant = registering(MUTANTS)


@mutant("an answer goes on with keys of a scale that its length has left behind", seed=7)
def step_never_outgrown() -> Any:
    return patch.object(Scheduler, "_outgrow", lambda self: None)


@mutant("a prompt shares KV that was computed at another scale", seed=7)
@contextmanager
def keys_ignore_the_step() -> Iterator[None]:
    def same(salt: bytes, step: int) -> bytes:
        return salt

    with patch.object(block_tables, "rope_salt", same), patch.object(generation, "rope_salt", same):
        yield


@mutant("new tokens have the scale of the longer of two requests in a step", seed=7)
def step_of_the_batch() -> Any:
    def longest(chunks: Any, lengths: Any) -> Any:
        steps = lengths.repeat(lengths) * 0 + max(chunk.request.rope_step for chunk in chunks)
        return steps if steps.any() else None

    return patch.object(batch_builder, "_rope_steps", longest)
