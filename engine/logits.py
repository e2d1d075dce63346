"""Edits logits before a token is chosen: the first half of docs/sampling.md's order.

    repetition penalty -> presence and frequency penalty -> logit_bias -> min_tokens
    -> allowed_token_ids -> grammar mask

Owns the arithmetic. Which tokens of which rows is said by engine.batch.LogitEdits. A token that
may not be sampled has logit -inf from then on.

Shape suffixes: S rows, V vocabulary, E entries of a ragged array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from baton.errors import BatonError
from engine.upload import uploaded

if TYPE_CHECKING:
    from engine.batch import Biases, BoolArray, LogitEdits, Penalties, RowTokens
    from engine.token_mask import TokenMask, UInt32Array


def edit_(logits_SV: torch.Tensor, edits: LogitEdits) -> dict[int, BatonError]:
    """Applies the edits in place, in the one order; returns the errors of rows whose mask has none to give.

    Waits for masks that are still being computed.
    """
    if edits.penalties is not None:
        _penalise(logits_SV, edits.penalties)
    if edits.biases is not None:
        _bias(logits_SV, edits.biases)
    if edits.banned is not None:
        logits_SV[_index(edits.banned, logits_SV.device)] = -torch.inf
    if edits.allowed is not None:
        _allow_only(logits_SV, edits.allowed)
    return _mask(logits_SV, edits.masks)


def unpack(bits: UInt32Array, vocab_size: int) -> BoolArray:
    """[vocab_size] bool of a mask's words; bit i % 32 of word i // 32 is token i."""
    little_endian = bits.astype("<u4", copy=False).view(np.uint8)
    return np.unpackbits(little_endian, count=vocab_size, bitorder="little").astype(np.bool_)


def _penalise(logits_SV: torch.Tensor, penalties: Penalties) -> None:
    """Repetition as transformers' RepetitionPenaltyLogitsProcessor, the others by OpenAI's formula.

    x <- x * r if x < 0 else x / r;    x <- x - count * frequency - (count > 0) * presence
    """
    device = logits_SV.device
    index = _index(penalties.at, device)
    rows_E, counts_E = index[0], uploaded(penalties.counts, device)
    repetition_E, presence_E, frequency_E = (
        uploaded(values, device)[rows_E]
        for values in (penalties.repetition, penalties.presence, penalties.frequency)
    )
    logits_E = logits_SV[index]
    logits_E = torch.where(logits_E < 0, logits_E * repetition_E, logits_E / repetition_E)
    logits_E = logits_E - counts_E * frequency_E - (counts_E > 0) * presence_E
    # A small penalty may overflow; what was finite stays so. NaN stays NaN.
    limit = torch.finfo(logits_E.dtype).max
    logits_SV[index] = logits_E.clamp(-limit, limit)


def _bias(logits_SV: torch.Tensor, biases: Biases) -> None:
    values = uploaded(biases.values, logits_SV.device)
    logits_SV.index_put_(_index(biases.at, logits_SV.device), values, accumulate=True)


def _allow_only(logits_SV: torch.Tensor, allowed: RowTokens) -> None:
    index = _index(allowed, logits_SV.device)
    kept_E = logits_SV[index]
    logits_SV[uploaded(np.unique(allowed.rows), logits_SV.device)] = -torch.inf
    logits_SV[index] = kept_E


def _mask(logits_SV: torch.Tensor, masks: Sequence[tuple[int, TokenMask]]) -> dict[int, BatonError]:
    errors: dict[int, BatonError] = {}
    for row, mask in masks:
        try:
            bits = mask.bits()
        except BatonError as error:
            errors[row] = error
        else:
            allowed_V = uploaded(unpack(bits, logits_SV.shape[1]), logits_SV.device)
            logits_SV[row].masked_fill_(~allowed_V, -torch.inf)
    return errors


def _index(at: RowTokens, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return uploaded(at.rows, device), uploaded(at.token_ids, device)
