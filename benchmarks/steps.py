"""What a step costs besides the model: `python -m benchmarks.steps [--rounds N]`.

Answers that decode at once, in a scheduler of their own with logits that were drawn beforehand: choosing the
batch and building it, planning its attention, sampling, and taking the tokens in. benchmarks/README.md says
what the rows mean.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from baton.limits import Limits
from baton.sampling import SamplingParams
from benchmarks.report import RESULTS, Row, publish
from engine.batch import ForwardBatch, StepOutput
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.cpu.attention import CpuAttention
from engine.cpu.chunk_choice import CASES, ChunkChoice
from engine.request import Request
from engine.sampler import sample
from engine.scheduler import Scheduler

RUNNING = (1, 8, 64, 256)
PROMPT, STEPS, BLOCK = 500, 40, 64
VOCAB = 49_152
# Milliseconds of all but the sampler, whose time is that of reading the logits.
TARGETS_MS = {64: 0.3, 256: 1.0}
BATCH, PLAN, SAMPLE, TAKE = "choose and build the batch", "plan attention", "sample", "take the tokens in"
KINDS = {"greedy": SamplingParams(max_tokens=STEPS + 8, temperature=0.0, ignore_eos=True)}
KINDS["drawn"] = replace(KINDS["greedy"], temperature=0.8, top_k=50, top_p=0.95, seed=7)

Times = dict[str, list[float]]


class Steps:
    """So many answers that decode; step() is one step of all of them."""

    def __init__(self, running: int, params: SamplingParams, clock: Callable[[], float]) -> None:
        self._clock = clock
        limits = Limits(max_model_len=4096, vocab_size=VOCAB)
        config = EngineConfig(max_batch_tokens=1 << 20, chunk_tokens=1024, max_running=running + 1)
        pool = BlockPool(running * (-(-(PROMPT + STEPS + 16) // BLOCK)) + 1, BLOCK, prefix_cache=False)
        self._scheduler = Scheduler(pool, limits, config=config, eos_token_ids=())
        self._attention = CpuAttention(ChunkChoice(dict.fromkeys(CASES, True)))
        for index in range(running):
            prompt = [(index + at) % VOCAB for at in range(PROMPT)]
            request = Request(
                attempt_id=index.to_bytes(16, "big"),
                token_ids=prompt,
                num_prompt_tokens=PROMPT,
                params=params,
            )
            self._scheduler.add(request)
        self._logits = torch.randn(running, VOCAB, generator=torch.Generator().manual_seed(running))
        # The prompts, whose KV nobody computes here.
        while (batch := self._next()).num_tokens != running:
            self._scheduler.apply(self._output(batch))
        self._batch: ForwardBatch | None = batch

    def step(self, times: Times) -> None:
        """One step, its parts in seconds."""
        with self._timed(times, BATCH):
            batch = self._batch or self._next()
        with self._timed(times, PLAN):
            self._attention.plan_attention(batch, BLOCK, torch.device("cpu"), (0,))
        with self._timed(times, SAMPLE):
            output = self._output(batch)
        with self._timed(times, TAKE):
            self._scheduler.apply(output)
        self._batch = None

    def _next(self) -> ForwardBatch:
        batch = self._scheduler.next_batch()
        assert batch is not None, "all answers are as long as the run"
        return batch

    def _output(self, batch: ForwardBatch) -> StepOutput:
        sampled = sample(self._logits[: len(batch.logits_rows)], batch.sampling)
        return StepOutput(
            step_id=batch.step_id,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            finite=sampled.finite,
            top=sampled.top,
        )

    @contextmanager
    def _timed(self, times: Times, part: str) -> Iterator[None]:
        began = self._clock()
        yield
        times[part].append(self._clock() - began)


def rows_of(running: int, kind: str, times: Times) -> list[Row]:
    """Medians in milliseconds; the sum is of all but the sampler."""
    found = {part: 1000 * median(values) for part, values in times.items()}
    runs = len(times[BATCH])
    rows = [
        Row(metric=f"{running} running, {kind}: {part}", unit="ms", ours=value, runs=runs)
        for part, value in found.items()
    ]
    besides = sum(value for part, value in found.items() if part != SAMPLE)
    target = TARGETS_MS.get(running)
    # A limit is a peer whose value is the target: the ratio says how far below it ours is.
    rows.append(
        Row(
            metric=f"{running} running, {kind}: all but sampling",
            unit="ms",
            ours=besides,
            peer=target,
            peer_name="the limit" if target else None,
            ratio=target / besides if target else None,
            target=1.0 if target else None,
            runs=runs,
        )
    )
    return rows


def main() -> int:
    """All sizes and kinds, one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="medians are over all their steps")
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the dated copy")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for running in RUNNING:
        for kind, params in KINDS.items():
            times: Times = defaultdict(list)
            for _ in range(arguments.rounds):
                steps = Steps(running, params, time.perf_counter)
                # The first one has its batch already.
                steps.step(defaultdict(list))
                for _ in range(STEPS - 8):
                    steps.step(times)
            rows += rows_of(running, kind, times)
    publish("steps", rows, arguments.json, folder=arguments.results, vocabulary=VOCAB, threads=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
