from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from benchmarks.precision import EXACT, Deviation
from benchmarks.precision_run import Computed, Precision, compute
from benchmarks.tiny_llama import write_tiny_model

torch.set_num_threads(1)

PROMPTS = [[random.Random(3).randrange(100) for _ in range(length)] for length in (40, 33)]


def computed(logits: list[list[list[float]]], num_saturated: int = 0) -> Computed:
    return Computed(logits=torch.tensor(logits), num_saturated=num_saturated)


def test_a_deviation_is_that_of_logits_and_of_greedy_tokens() -> None:
    exact = computed([[[0.0, 2.0], [4.0, 2.0]]])
    other = computed([[[0.0, 2.0], [1.0, 2.0]]], num_saturated=7)

    found = Deviation.between(exact, other)

    assert found.max_logit == 3.0
    assert found.rms_logit == pytest.approx(1.5)  # one of four is off by 3
    assert found.span == pytest.approx(2**0.5)
    assert (found.num_equal, found.num_tokens, found.num_saturated) == (1, 2, 7)


def test_of_several_models_the_worst_counts() -> None:
    small = Deviation.between(computed([[[0.0, 2.0]]]), computed([[[0.0, 2.5]]]))
    large = Deviation.between(computed([[[0.0, 2.0]]]), computed([[[5.0, 2.0]]], num_saturated=1))

    worst = Deviation.worst_of([large, small])

    assert (worst.max_logit, worst.num_equal, worst.num_tokens, worst.num_saturated) == (5.0, 1, 2, 1)


def test_runs_go_on_with_the_tokens_they_are_given(tmp_path: Path) -> None:
    reference = write_tiny_model(tmp_path)
    exact = compute(str(tmp_path), EXACT, PROMPTS, 3)
    half = Precision(dtype="float32", prefill_kv="float32", decode_kv="bfloat16")
    other = compute(str(tmp_path), half, PROMPTS, exact.token_ids)

    for index, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            tokens = [*prompt, *exact.token_ids[:2, index].tolist()]
            expected = reference(torch.tensor([tokens])).logits[0, len(prompt) - 1 :]
        torch.testing.assert_close(exact.logits[:, index], expected, rtol=0.0, atol=1e-4)
        assert torch.equal(other.logits[0, index], exact.logits[0, index])  # the prefill cache is the same
        assert 0 < (other.logits[1:, index] - expected[1:]).abs().max() < 0.5
