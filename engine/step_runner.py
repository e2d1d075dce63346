"""The port through which a worker runs one step of the model.

Production puts the engine thread behind it (engine/thread.py), a simulation a sleep of
the predicted cost. Knows neither models nor threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from engine.batch import ForwardBatch, StepOutput


class StepRunner(Protocol):
    """Runs steps, one at a time."""

    async def execute(self, batch: ForwardBatch) -> StepOutput:
        """Runs one step; whatever it raises reaches the caller."""
