"""transformers as a side: its own generate() over prompts of one length, eager, with its fused attention."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine.side import Generate, answer


def load(folder: str, threads: int) -> Generate:
    """In bfloat16."""
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                pad_token_id=0,
            )

    return generate


if __name__ == "__main__":
    answer(load)
