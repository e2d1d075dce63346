"""Steps of the tattle-tale model on virtual time: they cost what they are told to, and are watched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.batch import ForwardBatch, StepOutput
from engine.kv_cache import KVCache
from engine.model.tattletale import TattleTaleRunner
from engine.step_runner import OnLayers
from engine.stored import DONE
from tests.fakes import VOCAB


class SimStepRunner:
    """A StepRunner over a real cache.

    cost_s: of a batch. The layers are written one after another over that time, each at the end of its
        share: who reads one too early reads what was there before.
    observe: called before and after each step, when every block must be accounted for.
    """

    def __init__(
        self,
        cache: KVCache,
        cost_s: Callable[[ForwardBatch], float],
        observe: Callable[[], None],
    ) -> None:
        self._runner = TattleTaleRunner(cache, VOCAB)
        self._num_layers = cache.shape.num_layers
        self._cost_s = cost_s
        self._observe = observe

    async def execute(self, batch: ForwardBatch, on_layers: OnLayers | None = None) -> StepOutput:
        """Runs one step."""
        self._observe()
        layer_s = self._cost_s(batch) / self._num_layers
        stored = self._runner.store_layers(batch)
        for _ in range(self._num_layers):
            await asyncio.sleep(layer_s)
            num_layers = next(stored)
            if on_layers is not None:
                on_layers(num_layers, DONE)
        output = self._runner.sample(batch)
        self._observe()
        return output
