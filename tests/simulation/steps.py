"""Steps of the tattle-tale model on virtual time: they cost what they are told to, and are watched."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from engine.batch import ForwardBatch, StepOutput
from engine.kv_cache import KVCache
from engine.model.tattletale import TattleTaleRunner
from tests.fakes import VOCAB


class SimStepRunner:
    """A StepRunner over a real cache.

    wait: sleeps for the cost of a batch; what the step writes, it writes after that.
    observe: called before and after each step, when every block must be accounted for.
    """

    def __init__(
        self,
        cache: KVCache,
        wait: Callable[[ForwardBatch], Awaitable[None]],
        observe: Callable[[], None],
    ) -> None:
        self._runner = TattleTaleRunner(cache, VOCAB)
        self._wait = wait
        self._observe = observe

    async def execute(self, batch: ForwardBatch) -> StepOutput:
        """Runs one step."""
        self._observe()
        await self._wait(batch)
        output = self._runner.run(batch)
        self._observe()
        return output
