"""Carries the news of one step's layers from the engine thread to the event loop.

Owns what has been told and what has not. Knows neither the model nor what the news is for, and
starts no thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.step_runner import OnLayers
    from engine.stored import Stored


class LayerRelay:
    """One step's news. A loop that is busy hears of several layers at once, of each with what it waits for:
    the device may be at the first of them when the last has been launched.

    hop: has the loop call a function soon; callable on any thread.
    error: what on_layers raised; it is not called again then.
    """

    def __init__(self, on_layers: OnLayers, hop: Callable[[Callable[[], None]], object]) -> None:
        self._on_layers = on_layers
        self._hop = hop
        self._lock = threading.Lock()
        # What a hop that is under way will deliver.
        self._news: list[tuple[int, Stored]] = []
        self._closed = False
        self.error: Exception | None = None

    def stored(self, num_layers: int, stored: Stored) -> None:
        """An OnLayers for the engine thread."""
        with self._lock:
            needs_hop = not self._news and not self._closed
            self._news.append((num_layers, stored))
        if needs_hop:
            self._hop(self._deliver)

    def close(self) -> None:
        """On the loop: nothing is delivered from here on, even if the step goes on."""
        with self._lock:
            self._closed = True

    def _deliver(self) -> None:
        with self._lock:
            news, self._news = self._news, []
        if self._closed:
            return
        try:
            for num_layers, stored in news:
                self._on_layers(num_layers, stored)
        except Exception as error:  # noqa: BLE001  (it is handed to whoever awaits the step)
            self.error = error
            self.close()
