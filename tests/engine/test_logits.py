"""Edits of logits, against values worked out by hand and OpenAI's and transformers' formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.batch import Biases, LogitEdits, Penalties, RowTokens
from engine.logits import edit_, unpack
from engine.token_mask import TokenMask

LOGITS = [2.0, -1.0, 0.5, 0.0, -3.0]


def at(rows: list[int], token_ids: list[int]) -> RowTokens:
    return RowTokens(rows=np.array(rows, np.int64), token_ids=np.array(token_ids, np.int64))


def edited(edits: LogitEdits, num_rows: int = 2) -> list[list[float]]:
    logits = torch.tensor([LOGITS] * num_rows)
    assert edit_(logits, edits) == {}
    rows: list[list[float]] = logits.tolist()
    return rows


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_penalties() -> None:
    # Row 0: token 0 twice in the answer, token 1 in the prompt only. Row 1: token 4 once.
    penalties = Penalties(
        at=at([0, 0, 1], [0, 1, 4]),
        counts=floats(2, 0, 1),
        repetition=floats(2, 1),
        presence=floats(0.25, -0.5),
        frequency=floats(0.125, 1.5),
    )

    rows = edited(LogitEdits(penalties=penalties))

    assert rows[0] == [2.0 / 2 - 2 * 0.125 - 0.25, -1.0 * 2, 0.5, 0.0, -3.0]
    assert rows[1] == [2.0, -1.0, 0.5, 0.0, -3.0 - 1.5 + 0.5]


def test_each_edit_sees_what_the_one_before_has_left() -> None:
    # A bias after a penalty, exclusion after a bias, an allowed id that is banned, and the mask last.
    penalties = Penalties(
        at=at([0], [0]), counts=floats(0), repetition=floats(4), presence=floats(0), frequency=floats(0)
    )
    edits = LogitEdits(
        penalties=penalties,
        biases=Biases(at=at([0, 0], [0, 3]), values=floats(1, 100)),
        banned=at([0], [3]),
        allowed=at([0, 0, 0, 0], [0, 1, 2, 3]),
        masks=((0, TokenMask(lambda: np.array([0b11101], np.uint32))),),
    )

    rows = edited(edits)

    inf = float("inf")
    assert rows == [[2.0 / 4 + 1, -inf, 0.5, -inf, -inf], LOGITS]


def test_a_penalty_cannot_make_a_logit_infinite() -> None:
    logits = torch.tensor([[3e38, -3e38, 1.0]])
    penalties = Penalties(
        at=at([0, 0], [0, 1]), counts=floats(0, 0), repetition=floats(0.5), presence=floats(0),
        frequency=floats(0),
    )  # fmt: skip

    edit_(logits, LogitEdits(penalties=penalties))

    assert logits[0, 0] == torch.finfo(torch.float32).max
    assert logits[0, 1] == pytest.approx(-1.5e38)
    doubled = Penalties(
        at=at([0], [1]), counts=floats(0), repetition=floats(3), presence=floats(0), frequency=floats(0)
    )
    edit_(logits, LogitEdits(penalties=doubled))
    assert logits[0, 1] == torch.finfo(torch.float32).min


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 97])
def test_a_mask_is_read_bit_by_bit(vocab_size: int) -> None:
    allowed = [token_id % 5 in {0, 3} for token_id in range(vocab_size)]
    words = [0] * -(-vocab_size // 32)
    for token_id in np.flatnonzero(allowed).tolist():
        words[token_id // 32] |= 1 << token_id % 32

    assert unpack(np.array(words, np.uint32), vocab_size).tolist() == allowed
