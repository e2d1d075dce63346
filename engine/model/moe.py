"""A mixture of experts: every token is computed by the few MLPs that a router chooses for it.

    p = softmax(x @ router.T);  out = sum over the chosen e of p[e] * mlp_e(x)

The tokens of an expert are gathered and computed as one product; experts that nobody chose cost nothing.

Shape suffixes: T tokens, D hidden, E experts, F intermediate, C chosen experts per token, P = T * C pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from baton.model_config import MoeConfig
from engine.model.layers import gated


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """One layer's mixture.

    router: [E, D] fp32, because a rounded score can choose another expert.
    gate_up: [E, 2F, D], gate first.  down: [E, D, F].
    """

    config: MoeConfig
    activation: str
    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] fp32."""
        weights_TC, chosen_TC = self.choose(x_TD)
        num_chosen = chosen_TC.shape[1]
        chosen_P = chosen_TC.flatten()
        by_expert_P = chosen_P.argsort(stable=True)
        counts = torch.bincount(chosen_P, minlength=self.config.num_experts).tolist()
        weights_P = weights_TC.flatten()
        out_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
        for expert, pairs in enumerate(torch.split(by_expert_P, counts)):
            if len(pairs):
                rows = pairs // num_chosen
                computed = self._mlp(expert, x_TD[rows]).float()
                out_TD.index_add_(0, rows, computed * weights_P[pairs, None])
        return out_TD

    def choose(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights, fp32, and numbers of each token's experts: two [T, C] tensors."""
        scores_TE = functional.linear(x_TD.float(), self.router)
        weights_TC, chosen_TC = scores_TE.softmax(dim=-1).topk(self.config.num_chosen, dim=-1)
        if self.config.normalizes:
            weights_TC = weights_TC / weights_TC.sum(dim=-1, keepdim=True)
        return weights_TC, chosen_TC

    def _mlp(self, expert: int, x_PD: torch.Tensor) -> torch.Tensor:
        gate_up = functional.linear(x_PD, self.gate_up[expert])
        return functional.linear(gated(gate_up, self.activation), self.down[expert])
