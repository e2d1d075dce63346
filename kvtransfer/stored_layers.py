"""What the step that completes a prompt has told of its layers.

Owns what a frame of some of them waits for. Must not know how frames are cut or read.
"""

from __future__ import annotations

from bisect import bisect_left

from engine.stored import DONE, Stored


class StoredLayers:
    """The news of one step, a record for each number of layers."""

    def __init__(self) -> None:
        self._ends: list[int] = []
        self._news: list[Stored] = []

    @property
    def num_layers(self) -> int:
        """How many leading layers it has told of."""
        return self._ends[-1] if self._ends else 0

    def add(self, num_layers: int, stored: Stored) -> None:
        """Further layers; what has been told already is not told again."""
        if num_layers > self.num_layers:
            self._ends.append(num_layers)
            self._news.append(stored)

    def before(self, end_layer: int) -> Stored:
        """What has to happen before the layers up to that one are read: no more than it must."""
        return self._news[bisect_left(self._ends, end_layer)]

    def after(self) -> Stored:
        """What there is to know once the step has ended: only where it has stored a second time."""
        return Stored(staged=self._news[-1].staged) if self._news else DONE
