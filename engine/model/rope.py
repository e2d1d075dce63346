"""Rotary position embeddings: which scaling a model uses, and its table of angles.

    inv_freq[i] = theta ** (-2 i / h),  angle[p, i] = p * inv_freq[i],  i < h / 2
    rotated = x * cos(angle) + rotate_half(x) * sin(angle),  rotate_half([a, b]) = [-b, a]

linear scaling divides every frequency by `factor`; llama3 divides the low ones and
interpolates between (Llama 3.1). Angles are computed in fp64 from integer positions and
kept as fp32 cosines and sines: half-precision angles lose whole turns long before they
overflow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.errors import ModelError

if TYPE_CHECKING:
    import torch

ROPE_TYPES = ("default", "linear", "llama3")
_ORIGINAL_LENGTH = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Parameters of the rotary embedding; the factors are those of Llama 3.1's rope_scaling."""

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Reads `rope_parameters`, or the older `rope_theta` and `rope_scaling`.

        Raises ModelError naming a rope type or parameter that is not supported.
        """
        parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope_type = parameters.get("rope_type", parameters.get("type", "default"))
        if rope_type not in ROPE_TYPES:
            raise ModelError(
                f"config.json: rope type {rope_type!r} is not supported; "
                f"supported are {', '.join(ROPE_TYPES)}"
            )
        if parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
            raise ModelError("config.json: partial_rotary_factor is not supported")
        theta = float(parameters.get("rope_theta", config.get("rope_theta", 10000.0)))
        if rope_type == "default":
            return cls(theta=theta)
        if rope_type == "linear":
            return cls(rope_type=rope_type, theta=theta, factor=_number(parameters, "factor"))
        return cls(
            rope_type=rope_type,
            theta=theta,
            factor=_number(parameters, "factor"),
            low_freq_factor=_number(parameters, "low_freq_factor"),
            high_freq_factor=_number(parameters, "high_freq_factor"),
            # Once a setting of the whole model, now of its rope parameters.
            original_max_position_embeddings=int(_number({**config, **parameters}, _ORIGINAL_LENGTH)),
        )

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """The h / 2 frequencies in radians per position, highest first."""
        plain = [self.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        if self.rope_type == "llama3":
            return [self._llama3(frequency) for frequency in plain]
        return [frequency / self.factor for frequency in plain]

    def _llama3(self, frequency: float) -> float:
        # Turns that the frequency makes within the original context decide how much it is stretched.
        turns = self.original_max_position_embeddings * frequency / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = min(max(kept, 0.0), 1.0)
        return kept * frequency + (1 - kept) * frequency / self.factor


def rope_table(
    config: RopeConfig, head_dim: int, max_model_len: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines of every position: two [max_model_len, head_dim] fp32 tensors.

    The first half of the sines carries the minus sign of rotate_half, so that a rotation is
    x * cos + swap_halves(x) * sin.
    """
    import torch  # noqa: PLC0415  (RopeConfig is read by engine/config.py, which knows no torch)

    positions = torch.arange(max_model_len, dtype=torch.float64, device=device)
    frequencies = torch.tensor(config.inverse_frequencies(head_dim), dtype=torch.float64, device=device)
    angles = positions[:, None] * frequencies[None, :]
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)


def _number(parameters: Mapping[str, Any], key: str) -> float:
    value = parameters.get(key)
    if not isinstance(value, int | float) or value <= 0:
        raise ModelError(f"config.json: rope parameter {key} is {value!r}; a positive number is needed")
    return float(value)
