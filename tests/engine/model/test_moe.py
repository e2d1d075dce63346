"""A mixture's sums against a loop over tokens, and that what they cost does not follow from the cutting."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from baton.model_config import MoeConfig
from engine.model.moe import Experts

NUM_EXPERTS, HIDDEN, INNER, NUM_CHOSEN = 7, 20, 12, 3


def experts(*, dtype: torch.dtype = torch.float32, normalizes: bool = True) -> Experts:
    torch.manual_seed(5)
    config = MoeConfig(
        num_experts=NUM_EXPERTS, num_chosen=NUM_CHOSEN, intermediate_size=INNER, normalizes=normalizes
    )
    return Experts(
        config=config,
        activation="silu",
        router=torch.randn(NUM_EXPERTS, HIDDEN),
        gate_up=torch.randn(NUM_EXPERTS, 2 * INNER, HIDDEN).to(dtype),
        down=torch.randn(NUM_EXPERTS, HIDDEN, INNER).to(dtype),
    )


def by_token(mixture: Experts, x_TD: torch.Tensor) -> torch.Tensor:
    """One token and one expert after the other, in fp64."""
    out = torch.zeros(x_TD.shape, dtype=torch.float64)
    for token, x in enumerate(x_TD.double()):
        scores = (mixture.router.double() @ x).softmax(dim=0)
        best = sorted(range(NUM_EXPERTS), key=lambda expert: -float(scores[expert]))[:NUM_CHOSEN]
        total = sum(float(scores[expert]) for expert in best) if mixture.config.normalizes else 1.0
        for expert in best:
            gate, up = (mixture.gate_up[expert].double() @ x).chunk(2)
            mlp = mixture.down[expert].double() @ (functional.silu(gate) * up)
            out[token] += mlp * float(scores[expert]) / total
    return out


@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 2, 29])
def test_each_token_is_the_weighted_sum_of_its_experts(num_tokens: int, normalizes: bool) -> None:
    mixture = experts(normalizes=normalizes)
    x_TD = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(num_tokens))

    computed = mixture(x_TD)

    assert computed.dtype is torch.float32
    torch.testing.assert_close(computed.double(), by_token(mixture, x_TD), atol=1e-4, rtol=1e-4)


def test_half_precision_is_summed_in_fp32() -> None:
    # All experts are the same one, and the weights of the three chosen add up to 1: its values come back,
    # unless weights, products or sums are rounded.
    mixture = experts(dtype=torch.bfloat16)
    mixture.router.zero_()
    mixture.gate_up.copy_(mixture.gate_up[:1].expand_as(mixture.gate_up).clone())
    mixture.down.copy_(mixture.down[:1].expand_as(mixture.down).clone())
    x_TD = torch.randn(5, HIDDEN).bfloat16()
    gate, up = functional.linear(x_TD, mixture.gate_up[0]).chunk(2, dim=-1)
    one = functional.linear(functional.silu(gate) * up, mixture.down[0]).float()

    torch.testing.assert_close(mixture(x_TD), one, atol=0, rtol=1e-6)


def test_no_tokens() -> None:
    assert experts()(torch.empty(0, HIDDEN)).shape == (0, HIDDEN)


class Operators(TorchDispatchMode):
    """Counts what is computed, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_tokens_are_gathered_and_put_back_once_for_all_experts() -> None:
    with torch.inference_mode(), Operators() as operators:
        experts()(torch.randn(29, HIDDEN))

    assert operators.counts["index"] == 1
    assert operators.counts["index_put_"] == 1
    assert operators.counts["index_add_"] == 0
