"""The port through which a worker runs one step of the model.

Production puts the engine thread behind it (engine/thread.py), a simulation a sleep of
the predicted cost. Knows neither models nor threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from engine.batch import ForwardBatch, StepOutput
    from engine.stored import Stored

# Called with (num_layers, stored): the first num_layers layers hold the KV of all of the batch's tokens, once
# what `stored` says has happened. num_layers rises, and may skip numbers.
OnLayers = Callable[[int, "Stored"], None]


class StepRunner(Protocol):
    """Runs steps, one at a time."""

    async def execute(self, batch: ForwardBatch, on_layers: OnLayers | None = None) -> StepOutput:
        """Runs one step; whatever it raises reaches the caller.

        on_layers: called on the event loop while the step runs, and never once this has returned. A step
            that nobody watches pays nothing for it.
        """
