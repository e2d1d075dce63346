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
        computed_PD = self._by_expert(x_TD[by_expert_P // num_chosen], counts)
        out_PD = torch.empty(computed_PD.shape, dtype=torch.float32, device=x_TD.device)
        out_PD[by_expert_P] = computed_PD.float()
        return out_PD.view(*chosen_TC.shape, x_TD.shape[1]).mul_(weights_TC[..., None]).sum(dim=1)

    def choose(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights, fp32, and numbers of each token's experts: two [T, C] tensors."""
        scores_TE = functional.linear(x_TD.float(), self.router)
        weights_TC, chosen_TC = scores_TE.softmax(dim=-1).topk(self.config.num_chosen, dim=-1)
        if self.config.normalizes:
            weights_TC = weights_TC / weights_TC.sum(dim=-1, keepdim=True)
        return weights_TC, chosen_TC

    def _by_expert(self, x_PD: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """The pairs' MLPs: the first counts[0] rows are expert 0's, and so on."""
        out_PD = torch.empty_like(x_PD)
        rows, outs = torch.split(x_PD, counts), torch.split(out_PD, counts)
        for expert, count in enumerate(counts):
            if count:
                outs[expert].copy_(self._mlp(expert, rows[expert]))
        return out_PD

    def _mlp(self, expert: int, x_PD: torch.Tensor) -> torch.Tensor:
        gate_up = functional.linear(x_PD, self.gate_up[expert])
        return functional.linear(gated(gate_up, self.activation), self.down[expert])
