"""Philox4x32-10 and the Gumbel numbers of the sampler: a pure function of key and counter.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Ten rounds, each
    (c0, c1, c2, c3) -> (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0))
with the key raised by (W0, W1) between rounds. Words of 32 bits are held in int64, which
every torch device has; the top half of a product that overflows the sign is masked back.

Layout for sampling, part of what SAMPLER_VERSION stands for:
    counter = (token_id // 4, position, sample_index, purpose),  lane = token_id % 4
    key     = (seed & 0xffffffff, seed >> 32)
    u       = ((word >> 9) + 0.5) * 2**-23,  gumbel = -log(-log(u)), both fp32
23 bits, because with 24 the largest u would round to 1 in fp32 and its gumbel to infinity.
"""

from __future__ import annotations

import math

import torch

PURPOSE_TOKEN = 0
"""Counter word 3 of the draw of a token; other uses of the same key take other numbers."""

GUMBEL_MAX = -math.log(-math.log1p(-(2.0**-24)))
GUMBEL_MIN = -math.log(-math.log(2.0**-24))
"""Bounds of gumbel(); a token further than their difference below another cannot win."""

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """The four output words; all arguments int64 in [0, 2**32), of shapes that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = _high(p1) ^ (c1 ^ k0), p1 & _MASK, _high(p0) ^ (c3 ^ k1), p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def gumbel(
    token_ids: torch.Tensor,
    *,
    seed_low: torch.Tensor,
    seed_high: torch.Tensor,
    position: torch.Tensor,
    sample_index: torch.Tensor,
    purpose: int = PURPOSE_TOKEN,
) -> torch.Tensor:
    """fp32 Gumbel numbers of tokens; all arguments int64 of one shape."""
    counter = (token_ids // 4, position, sample_index, torch.full_like(token_ids, purpose))
    words = torch.stack(philox(counter, (seed_low, seed_high)))
    return _gumbel_of(words.gather(0, (token_ids % 4)[None])[0])


def gumbel_of_all(
    vocab_size: int,
    *,
    seed: int,
    position: int,
    sample_index: int,
    purpose: int = PURPOSE_TOKEN,
    device: torch.device | None = None,
) -> torch.Tensor:
    """[vocab_size] fp32: gumbel() of every token of one row, at a quarter of the work per token."""
    blocks = torch.arange(-(-vocab_size // 4), device=device)

    def word(value: int) -> torch.Tensor:
        return torch.full_like(blocks[:1], value)

    counter = (blocks, word(position), word(sample_index), word(purpose))
    words = philox(counter, (word(seed & _MASK), word(seed >> 32)))
    return _gumbel_of(torch.stack(words, dim=1).flatten()[:vocab_size])


def _gumbel_of(words: torch.Tensor) -> torch.Tensor:
    uniform = (words >> 9).float().add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def _high(product: torch.Tensor) -> torch.Tensor:
    # An arithmetic shift copies the sign; the mask leaves the 32 bits of the unsigned product.
    return (product >> 32).bitwise_and_(_MASK)
