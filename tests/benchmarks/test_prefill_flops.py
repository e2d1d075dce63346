"""The formula of a prefill's cost against counting, and a fit against rates that are known."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from baton.model_config import ModelConfig
from benchmarks.long_prompts import Rounds
from benchmarks.prefill_flops import FittedRates, attention_flops, linear_flops, mean_keys

SIZES = {
    "vocab_size": 101,
    "hidden_size": 60,
    "intermediate_size": 84,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 160,
}
CONFIG = ModelConfig.from_hf({"architectures": ["LlamaForCausalLM"], **SIZES})


def test_projections_are_those_that_torch_counts_for_the_model() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    projections = {
        name: module for name, module in model.model.named_modules() if isinstance(module, torch.nn.Linear)
    }
    last = "layers.2."
    skipped = (f"{last}self_attn.o_proj", f"{last}mlp.")

    with FlopCounterMode(display=False) as counter:
        for name, module in projections.items():
            if not name.startswith(skipped):
                module(torch.zeros(1, module.in_features))

    assert linear_flops(CONFIG) == counter.get_total_flops()


@pytest.mark.parametrize(("num_tokens", "window"), [(1, 0), (50, 0), (50, 1), (50, 7), (50, 50), (50, 99)])
def test_keys_in_the_mean_are_those_of_a_count(num_tokens: int, window: int) -> None:
    counts = [min(i + 1, window or num_tokens) for i in range(num_tokens)]

    assert mean_keys(num_tokens, window) == pytest.approx(sum(counts) / num_tokens)


def test_attention_is_two_products_over_half_the_context_in_every_layer() -> None:
    assert attention_flops(CONFIG, 999) == 3 * 2 * (2 * 6 * 20) * 500


def test_a_fit_finds_the_rates_that_times_were_made_from() -> None:
    attention = [1e6, 4e6, 16e6, 64e6]

    fitted = FittedRates.of(5e6, attention, [5e6 / 3e9 + flops / 2e9 for flops in attention])

    assert (fitted.linear, fitted.attention) == (pytest.approx(3e9), pytest.approx(2e9))
    assert fitted.error < 1e-9


def test_a_fit_tells_how_far_off_it_is() -> None:
    # The same work in 1, 1 and 2 s: 2 (t - 1)^2 + (t / 2 - 1)^2 is least at t = 10 / 9, 4 / 9 below 2.
    fitted = FittedRates.of(1.0, [1.0, 1.0, 1.0], [1.0, 1.0, 2.0])

    assert fitted.error == pytest.approx(4 / 9)


def test_rows_compare_medians_with_the_formula_and_the_scaled_with_the_plain() -> None:
    rounds = Rounds(
        gemm=[1e9, 3e9, 2e9],
        plain={10: [1.0, 2.0, 3.0], 100: [40.0, 30.0, 20.0]},
        others={"dynamic rope": [50.0, 30.0, 20.0]},
    )

    rows = {row.metric: row for row in rounds.rows(CONFIG)}

    assert rows["matrix product"].ours == 2.0
    ten = rows["10 tokens, each"]
    assert ten.ours == 0.2e6
    assert ten.peer == pytest.approx((linear_flops(CONFIG) + 3 * 480 * 5.5) / 2e9 * 1e6)
    assert ten.ratio == pytest.approx(ten.peer / 0.2e6)
    scaled = rows["100 tokens, each, dynamic rope"]
    assert (scaled.ours, scaled.peer, scaled.ratio) == (0.3e6, 0.3e6, 1.0)
