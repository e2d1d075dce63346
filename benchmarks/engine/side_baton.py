"""Baton's engine as a side: scheduler, batches, model and sampler. Fourth argument: its `kernels`."""

from __future__ import annotations

import sys

from baton.sampling import SamplingParams
from benchmarks.engine.side import Generate, answer
from engine.config import EngineConfig
from engine.load import load_engine
from engine.loop import EngineLoop

# As vLLM's own defaults for generating without a server: whole prompts in a step.
MAX_BATCH_TOKENS = 4096
CACHE_BYTES = 2 << 30


def load(folder: str, threads: int) -> Generate:
    """Without a prefix cache, like all sides."""
    config = EngineConfig(
        model=folder,
        dtype="bfloat16",
        threads=threads,
        kernels=sys.argv[4].replace("compile", "auto"),
        compile=sys.argv[4] == "compile",
        kv_cache_bytes=CACHE_BYTES,
        prefix_cache=False,
        max_batch_tokens=MAX_BATCH_TOKENS,
        chunk_tokens=MAX_BATCH_TOKENS // 2,
        mixed_tokens=MAX_BATCH_TOKENS // 2,
    )
    runner = load_engine(config)
    if config.compile:
        runner.compile()
    runner.warm_up()
    loop = EngineLoop(runner, config)

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        loop.generate(prompts, SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True))

    return generate


if __name__ == "__main__":
    answer(load)
