"""Prefill and decode in one process, synchronously: the control that everything else is compared with.

Drives the scheduler and the runner that the workers use, without an event loop, a
network or a transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.sampling import SamplingParams
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.events import Event, RequestFailed
from engine.request import Request
from engine.runner import ModelRunner
from engine.scheduler import Scheduler


class EngineLoop:
    """One engine that generates answers to a list of prompts."""

    def __init__(self, runner: ModelRunner, config: EngineConfig) -> None:
        self._runner = runner
        model, shape = runner.model.config, runner.cache.shape
        self.pool = BlockPool(shape.num_blocks, shape.block_size, prefix_cache=config.prefix_cache)
        self._limits = model.limits
        self._scheduler = Scheduler(self.pool, self._limits, config=config, eos_token_ids=model.eos_token_ids)

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
        """The generated tokens of each prompt; raises the first error of any of them."""
        requests = [
            Request(
                attempt_id=index.to_bytes(16, "big"),
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                params=params,
                arrived_at=index,
            )
            for index, prompt in enumerate(prompts)
        ]
        self.run(requests)
        return [request.token_ids[request.num_prompt_tokens :] for request in requests]

    def run(self, requests: Sequence[Request], handle: Callable[[Event], None] = lambda _event: None) -> None:
        """Runs requests to their end; raises the first error of any of them.

        handle: called with every event, while its request is as the event says.
        """
        for request in requests:
            self._add(request)
        while self._scheduler.has_work:
            self._step(handle)

    def _add(self, request: Request) -> None:
        request.scale_to(self._limits.rope_step(request.num_tokens))
        self._scheduler.add(request)

    def _step(self, handle: Callable[[Event], None]) -> None:
        batch = self._scheduler.next_batch()
        left = self._scheduler.take_left()
        for event in left:
            if isinstance(event, RequestFailed):
                raise event.error
            self._add(event.request)
        if batch is None:
            assert left, "add() refuses what can never run"
            return
        for event in self._scheduler.apply(self._runner.run(batch)):
            handle(event)
            if event.request.is_finished:
                self.pool.release(event.request.block_ids)
                event.request.block_ids = []
            if isinstance(event, RequestFailed):
                raise event.error
