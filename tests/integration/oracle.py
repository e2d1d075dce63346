"""transformers' own greedy answers, and the rule for what counts as equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

# Two logits closer than this may change places between two correct ways to add numbers.
TIE = 1e-4


@torch.no_grad()
def greedy(model: PreTrainedModel, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    """transformers' generate for a batch of prompts, padded on the left; never stops early."""
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    output = model.generate(
        padded,
        attention_mask=mask,
        max_new_tokens=num_tokens,
        min_new_tokens=None,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[:, longest:].tolist()


@torch.no_grad()
def assert_same(
    model: LlamaForCausalLM, prompt: list[int], expected: list[int], found: Sequence[int]
) -> None:
    """The tokens are equal, up to a place where transformers itself sees a tie."""
    assert len(found) == len(expected)
    place = next((i for i, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1]), None)
    if place is None:
        return
    logits = model(torch.tensor([prompt + expected[:place]])).logits[0, -1]
    margin = float(logits[expected[place]] - logits[found[place]])
    assert abs(margin) < TIE, (
        f"prompt of {len(prompt)} tokens: token {place} is {found[place]}, transformers says {expected[place]} "
        f"by {margin:.5f}"
    )
