"""Bugs of scale steps: KV of one scale of the model's positions where that of another is due."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from engine import batch_builder, block_tables
from engine.request import RequestStatus
from engine.scheduler import Scheduler
from tests.mutants.mutant import Mutant, registering

MUTANTS: list[Mutant] = []
mutant = registering(MUTANTS)


@mutant("an answer goes on with keys of a scale that its length has left behind", seed=7)
def step_never_outgrown() -> Any:
    return patch.object(Scheduler, "_outgrow", lambda self: None)


@mutant("an answer that waits for its place in the batch joins it at a scale that it has left", seed=14)
def only_who_runs_outgrows() -> Any:
    def outgrow(self: Any) -> None:
        for request in [r for r in self._running.values() if r.status is RequestStatus.DECODING]:
            if self._limits.rope_step(request.num_tokens) != request.rope_step:
                self.tables.publish(request)
                self._send_away(request, outgrown=True)

    return patch.object(Scheduler, "_outgrow", outgrow)


@mutant("a prompt shares KV that was computed at another scale", seed=7)
def keys_ignore_the_step() -> Any:
    # The workers' keys. Those of routers are guesses, which cost time where they are wrong and never a token:
    # tests/router/test_generation_outgrown.py holds them.
    return patch.object(block_tables, "rope_salt", lambda salt, step: salt)


@mutant("new tokens have the scale of the longer of two requests in a step", seed=7)
def step_of_the_batch() -> Any:
    def longest(chunks: Any, lengths: Any) -> Any:
        steps = lengths.repeat(lengths) * 0 + max(chunk.request.rope_step for chunk in chunks)
        return steps if steps.any() else None

    return patch.object(batch_builder, "_rope_steps", longest)
