"""vLLM's CPU build as a side. Run by the Python of an environment of its own, as a file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from side import Generate, answer  # type: ignore[import-not-found]

CACHE_GIB = 2


def load(folder: str, threads: int) -> Generate:
    """In bfloat16, without a prefix cache; its default is to compile."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB), "OMP_NUM_THREADS": str(threads)}
    if threads < (os.cpu_count() or 1):
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
    from vllm import LLM, SamplingParams  # noqa: PLC0415

    llm = LLM(model=folder, dtype="bfloat16", enable_prefix_caching=False, max_model_len=4096)

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        parameters = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False)

    return generate


if __name__ == "__main__":
    answer(load)
