"""Rotary position embeddings: the cosines and sines of a step's positions.

    inv_freq[i] = theta ** (-2 i / h),  angle[p, i] = p * inv_freq[i],  i < h / 2
    rotated = x * cos(angle) + rotate_half(x) * sin(angle),  rotate_half([a, b]) = [-b, a]

All is fp32, computed as transformers computes it (ROPE_INIT_FUNCTIONS): a model was trained with the
rounding of these formulas too, so its own angles are the right ones and not those of a finer arithmetic.
Nothing is ever half precision. No table is kept: a step computes the rows of its positions.

What scaling does to the frequencies, for a factor s:

    linear   inv_freq / s
    dynamic  theta becomes theta * (s L / original - (s - 1)) ** (h / (h - 2)), L the length of a scale step
    yarn     inv_freq / s for those that turn seldom within the original length, inv_freq for those that
             turn often, a ramp between
    llama3   the same with bounds by wavelength
    longrope inv_freq / short_factor[i] up to the original length, / long_factor[i] above

yarn and longrope also multiply cosines and sines with an attention factor. Scale steps: docs/adr/0008.
"""

from __future__ import annotations

import math

import torch

from baton.rope_config import RopeConfig


class Rope:
    """Cosines and sines of one rotary embedding on one device.

    rope_steps: the model's scale steps (baton/rope_config.py); () if it has one scale.
    """

    def __init__(
        self, config: RopeConfig, head_dim: int, rope_steps: tuple[int, ...], device: torch.device
    ) -> None:
        scaled_by_length = config.rope_type in ("dynamic", "longrope")
        lengths = (rope_steps if scaled_by_length else ()) or (config.original_length,)
        frequencies = [_frequencies(config, head_dim, length) for length in lengths]
        # One row per scale step, [steps, h / 2] fp32 radians per position.
        self.frequencies = torch.stack(frequencies).to(device)
        self._attention_factor = config.attention_factor

    def rows(
        self, positions_T: torch.Tensor, steps_T: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), each [T, 1, head_dim] fp32; the first half of sin has the sign of rotate_half.

        So a rotation is x * cos + swap_halves(x) * sin.
        positions_T: int64.  steps_T: int64, each token's scale step, or None: all 0.
        """
        one_scale = steps_T is None or len(self.frequencies) == 1
        frequencies = self.frequencies[:1] if one_scale else self.frequencies[steps_T]
        angles = positions_T[:, None].float() * frequencies
        cos, sin = angles.cos() * self._attention_factor, angles.sin() * self._attention_factor
        return torch.cat((cos, cos), dim=1)[:, None], torch.cat((-sin, sin), dim=1)[:, None]


def _frequencies(config: RopeConfig, head_dim: int, length: int) -> torch.Tensor:
    """[h / 2] fp32 radians per position on the CPU, highest first, at the scale for sequences of `length`."""
    powers = _powers(_theta(config, head_dim, length), head_dim)
    if config.rope_type == "yarn":
        return _yarn_frequencies(config, powers)
    if config.rope_type == "longrope":
        factors = config.long_factors if length > config.original_length else config.short_factors
        return 1.0 / (powers.new_tensor(factors) * powers)
    plain = 1.0 / powers
    if config.rope_type == "llama3":
        return _llama3_frequencies(config, plain)
    return plain / config.factor if config.rope_type == "linear" else plain


def _powers(theta: float | torch.Tensor, head_dim: int) -> torch.Tensor:
    powers: torch.Tensor = theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return powers


def _theta(config: RopeConfig, head_dim: int, length: int) -> float | torch.Tensor:
    if config.rope_type != "dynamic" or length <= config.original_length:
        return config.theta
    # transformers gets the length as a tensor, so its base is rounded to fp32.
    stretched = config.factor * torch.tensor(length) / config.original_length - (config.factor - 1)
    theta: torch.Tensor = config.theta * stretched ** (head_dim / (head_dim - 2))
    return theta


def _yarn_frequencies(config: RopeConfig, powers: torch.Tensor) -> torch.Tensor:
    num_frequencies = len(powers)
    low, high = _yarn_bounds(config, 2 * num_frequencies)
    ramp = ((torch.arange(num_frequencies).float() - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (config.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _yarn_bounds(config: RopeConfig, head_dim: int) -> tuple[float, float]:
    """Which frequencies begin and end the ramp: those that turn beta_fast and beta_slow times."""

    def index_of(turns: float) -> float:
        wavelengths = config.original_length / (turns * 2 * math.pi)
        return head_dim * math.log(wavelengths) / (2 * math.log(config.theta))

    low, high = index_of(config.beta_fast), index_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # A ramp of no width would divide by zero.
    return low, high + 0.001 if low == high else high


def _llama3_frequencies(config: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    original, factor = config.original_length, config.factor
    low, high = config.low_freq_factor, config.high_freq_factor
    wavelengths = 2 * math.pi / plain
    kept = (original / wavelengths - low) / (high - low)
    between = (1 - kept) * plain / factor + kept * plain
    scaled = torch.where(wavelengths > original / low, plain / factor, between)
    return torch.where(wavelengths < original / high, plain, scaled)
