"""The naive side of the headline: whole prompts in order of arrival, in batches padded to the longest.

A process of its own with the engine's own model: `python -m benchmarks.padded_fifo --model NAME`. It takes
what has arrived, at most a batch, and computes every row to the length of the longest prompt, padding
included. No length buckets, no packing, no chunks.

    standard input    {"number": 7, "token_ids": [...]}     a line per prompt
    standard output   {"ready": true}, then {"number": 7, "token_id": 42}
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from baton.limits import blocks_needed
from baton.models import ModelDir
from baton.sampling import SamplingParams
from engine.batch import ForwardBatch
from engine.batch_builder import Chunk, build_batch
from engine.config import EngineConfig
from engine.load import load_engine
from engine.request import Request
from engine.runner import ModelRunner

PAD_ID = 0
# The end of the input.
_END = None


class FirstTokens(Protocol):
    """What computes batches: PaddedBatches, or a test's fake."""

    def run(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """The first token of each prompt."""


class PaddedBatches:
    """Prompts of different lengths as one rectangle."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._step_id = 0

    def run(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """The first token of each prompt, greedily; the cache must have room for all of them, padded."""
        return [int(token_id) for token_id in self._runner.run(self.batch(prompts)).token_ids]

    def batch(self, prompts: Sequence[Sequence[int]]) -> ForwardBatch:
        """Every row has the longest prompt's tokens; what is sampled is behind a prompt's own last one.

        Padding follows the prompt, and attention is causal: it is computed, and changes no answer.
        """
        longest = max(map(len, prompts))
        block_size = self._runner.cache.shape.block_size
        width = blocks_needed(longest, block_size)
        chunks = [
            Chunk.of(_padded(prompt, longest, range(row * width, (row + 1) * width)), longest)
            for row, prompt in enumerate(prompts)
        ]
        self._step_id += 1
        packed = build_batch(self._step_id, chunks, block_size)
        last = [row * longest + len(prompt) - 1 for row, prompt in enumerate(prompts)]
        return replace(packed, logits_rows=np.array(last, np.int64))


def _padded(prompt: Sequence[int], length: int, blocks: range) -> Request:
    return Request(
        attempt_id=blocks.start.to_bytes(16, "big"),
        token_ids=[*prompt, *[PAD_ID] * (length - len(prompt))],
        num_prompt_tokens=length,
        params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        block_ids=list(blocks),
    )


def serve(model: FirstTokens, batch_size: int) -> None:
    """Answers prompts until the input ends."""
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # So that whoever sends is not held up by a batch that runs.
    threading.Thread(target=_read, args=(arrived,), daemon=True).start()
    _say({"ready": True})
    while True:
        batch = [arrived.get()]
        while len(batch) < batch_size and not arrived.empty():
            batch.append(arrived.get())
        prompts = [prompt for prompt in batch if prompt is not _END]
        if prompts:
            token_ids = model.run([prompt["token_ids"] for prompt in prompts])
            for prompt, token_id in zip(prompts, token_ids, strict=True):
                _say({"number": prompt["number"], "token_id": token_id})
        if len(prompts) < len(batch):
            return


def _read(arrived: queue.SimpleQueue[Any]) -> None:
    for line in sys.stdin:
        arrived.put(json.loads(line))
    arrived.put(_END)


def _say(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="a pulled model's name, or a folder")
    parser.add_argument("--threads", type=int, default=1, help="threads of one operator")
    parser.add_argument("--batch-size", type=int, default=4, help="most prompts of a batch")
    arguments = parser.parse_args()
    config = EngineConfig(
        model=arguments.model,
        threads=arguments.threads,
        max_running=arguments.batch_size,
        prefix_cache=False,
    )
    with torch.inference_mode():
        runner = load_engine(config, ModelDir.open(arguments.model))
        runner.warm_up()
        serve(PaddedBatches(runner), arguments.batch_size)


if __name__ == "__main__":
    main()
