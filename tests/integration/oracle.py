"""transformers' own greedy answers, and the rule for what counts as equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

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
def assert_greedy(model: PreTrainedModel, prompt: list[int], found: Sequence[int]) -> None:
    """The tokens are transformers' greedy ones, up to a place where transformers itself sees a tie.

    One forward pass over prompt and tokens yields the logits that generate would have seen at
    every place, as long as all tokens before it are the greedy ones; that is induction.
    """
    ids = torch.tensor([prompt + list(found[:-1])])
    logits = model(ids, logits_to_keep=len(found)).logits[0]
    for place, token_id in enumerate(found):
        best = int(logits[place].argmax())
        margin = float(logits[place, best] - logits[place, token_id])
        if best != token_id and margin < TIE:
            return
        assert best == token_id, (
            f"prompt of {len(prompt)} tokens: token {place} is {token_id}, transformers says {best} by "
            f"{margin:.5f}"
        )
