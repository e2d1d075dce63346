"""Attention over the paged cache: what a query sees, which head it reads, and the numbers against fp64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from engine.model import attention
from tests.engine.model.paged_attention import PagedSequences

# Ways of cutting a sequence of 12 or 40 tokens into steps.
CUTS = {
    "whole": lambda length: [(0, length)],
    "chunks of 7": lambda length: [(at, min(at + 7, length)) for at in range(0, length, 7)],
    "token by token": lambda length: [(at, at + 1) for at in range(length)],
    "one token, then the rest": lambda length: [(0, 1), (1, length)],
}


@pytest.fixture(params=["blocked", "fused"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How prompt chunks are computed: as on a CPU, or as on other devices."""
    monkeypatch.setattr(attention, "fuses_chunks", lambda _device: request.param == "fused")
    return str(request.param)


@pytest.fixture(params=["HND", "NHD"])
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def positions_seen(
    length: int, window: int, cut: str, *, block_size: int, others: Sequence[int] = ()
) -> list[list[int]]:
    """Of each query the positions whose values reach its output: equal weights, and a value per position."""
    sequences = PagedSequences([length], heads=(2, 1), head_dim=length, block_size=block_size)
    sequences.q[0].zero_()
    sequences.v[0] = torch.eye(length)[:, None]
    seen = []
    for span in CUTS[cut](length):
        (output,) = sequences.step([span], [window, *others])[window]
        assert output.isfinite().all()
        for weights in output[:, 0]:
            positions = weights.nonzero()[:, 0].tolist()
            torch.testing.assert_close(weights[positions], torch.full((len(positions),), 1 / len(positions)))
            seen.append(positions)
    return seen


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.usefixtures("path")
def test_a_window_of_four_shows_a_query_itself_and_three_keys_before_it(cut: str) -> None:
    seen = positions_seen(12, 4, cut, block_size=4)

    assert [len(positions) for positions in seen] == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4]
    assert seen == [list(range(max(0, i - 3), i + 1)) for i in range(12)]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("window", [1, 15, 16, 17, 39, 40, 41, 500], ids=lambda window: f"window {window}")
@pytest.mark.usefixtures("path")
def test_windows_beside_a_block_and_beside_the_length_hide_nothing_more_or_less(
    window: int, cut: str
) -> None:
    seen = positions_seen(40, window, cut, block_size=16, others=[0, 3])

    assert seen == [list(range(max(0, i - window + 1), i + 1)) for i in range(40)]


@pytest.mark.parametrize("heads", [(8, 2), (28, 4), (12, 3), (32, 8), (64, 8), (8, 1), (8, 8)])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.usefixtures("path")
def test_neighboring_query_heads_share_a_kv_head(heads: tuple[int, int], cut: str) -> None:
    num_heads, num_kv_heads = heads
    sequences = PagedSequences([12], heads=heads)
    sequences.v[0] = torch.arange(1.0, num_kv_heads + 1)[None, :, None].expand(12, -1, 10).clone()

    for span in CUTS[cut](12):
        for outputs in sequences.step([span], [0, 4]).values():
            read = outputs[0].mean(dim=(0, 2)).round(decimals=4).tolist()
            assert read == [1 + head // (num_heads // num_kv_heads) for head in range(num_heads)]


# Per sequence (first, end) of the tokens of a step; whatever is before them is in the cache.
STEPS = {
    "packed prompts": [(0, 37), (0, 2), (0, 150), (0, 64), (0, 5)],
    "continued chunks": [(7, 14), (35, 42), (140, 147), (1, 8), (60, 90)],
    "decode alone": [(9, 10), (300, 301), (0, 1), (33, 34), (2, 3), (63, 64), (3, 4)],
    "one decode token": [(70, 71)],
    "decode, chunks and prompts": [(0, 6), (200, 201), (16, 17), (41, 70), (0, 33), (4, 5)],
}


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
@pytest.mark.usefixtures("path")
def test_every_window_of_a_batch_gives_the_dense_softmax(
    step: list[tuple[int, int]], block_size: int, layout: str
) -> None:
    sequences = PagedSequences([end for _, end in step], block_size=block_size, layout=layout)
    windows = [0, 1, 2, 5, 16, 63, 64, 128, 1000]

    outputs = sequences.step(step, windows)

    for window in windows:
        for index, (first, end) in enumerate(step):
            torch.testing.assert_close(
                outputs[window][index].double(),
                sequences.expected(index, first, end, window),
                rtol=0,
                atol=2e-6,
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
@pytest.mark.usefixtures("path")
def test_wide_scores_tell_keys_apart_whose_scores_are_all_in_the_thousands(
    step: list[tuple[int, int]], dtype: torch.dtype, layout: str
) -> None:
    # One dimension gives every key the same score, 0.31 * 80 * 80 = 1984: steps of bfloat16 there are 8, of
    # float16 1, and the other dimensions' scores are around 1.
    sequences = PagedSequences([end for _, end in step], layout=layout, dtype=dtype)
    for q, k in zip(sequences.q, sequences.k, strict=True):
        q[..., 3] = k[..., 3] = 80

    outputs = sequences.step(step, [0, 5, 63], wide_scores=True)

    for window in outputs:
        for index, (first, end) in enumerate(step):
            output = outputs[window][index]
            assert output.dtype is dtype
            # Weights and the result are rounded: two halves of a step of a result that is seldom above 2.
            torch.testing.assert_close(
                output.double(),
                sequences.expected(index, first, end, window),
                rtol=2 * torch.finfo(dtype).eps,
                atol=torch.finfo(dtype).eps,
            )


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
@pytest.mark.usefixtures("path")
def test_wide_scores_are_what_fp32_has_anyway(step: list[tuple[int, int]]) -> None:
    sequences = PagedSequences([end for _, end in step])

    plain, wide = (sequences.step(step, [0, 5], wide_scores=wide) for wide in (False, True))

    for window in (0, 5):
        assert torch.equal(torch.cat(plain[window]), torch.cat(wide[window]))


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("most", [65504.0, -65504.0])
@pytest.mark.parametrize("span", [(8, 9), (5, 9)], ids=["decode", "chunk"])
@pytest.mark.usefixtures("path")
def test_float16_reads_its_largest_numbers_from_any_cache(
    span: tuple[int, int], most: float, cache_dtype: torch.dtype
) -> None:
    # bfloat16 has no 65504 and keeps 65536, which float16 has not.
    sequences = PagedSequences([9], dtype=torch.float16, cache_dtype=cache_dtype)
    sequences.q[0][..., 0] = 2**-14
    sequences.k[0][:, :, 0] = 0
    sequences.k[0][2, :, 0] = sequences.v[0][2, :, 0] = most
    expected = sequences.expected(0, *span, 0)
    # The key's score is 1.24 more than the others', or less, and its weight far from 0 and 1.
    weights = expected[..., 0] / most
    assert weights.min() > 0.001
    assert weights.max() < 0.95

    output = sequences.step([span], [0])[0][0]

    # Scores are rounded, and with a bfloat16 cache all other keys and values.
    torch.testing.assert_close(output.double(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("span", [(40, 41), (40, 43), (31, 50)], ids=["decode", "short chunk", "long chunk"])
@pytest.mark.usefixtures("path")
def test_blocks_wholly_before_the_window_are_not_read(span: tuple[int, int], layout: str) -> None:
    first, end = span
    sequences = PagedSequences([end, 7], block_size=4, layout=layout)
    expected = sequences.expected(0, first, end, 9)
    # The first query sees 9 keys; what lies in front of the block of the first of them is poison.
    unread = (first - 8) // 4 * 4
    sequences.k[0][:unread] = torch.nan
    sequences.v[0][:unread] = torch.nan

    output = sequences.step([span, (6, 7)], [9])[9][0]

    torch.testing.assert_close(output.double(), expected, rtol=0, atol=2e-6)


def test_a_window_reads_as_many_blocks_at_any_length() -> None:
    def blocks_read(length: int, window: int) -> int:
        plan = PagedSequences([length], heads=(1, 1), head_dim=2).plan([(length - 1, length)], [0, window])
        (group,) = plan.by_window[window].groups
        return len(group.block_ids)

    assert [blocks_read(length, 9) for length in (48, 800, 8000)] == [3, 3, 3]
    assert [blocks_read(length, 0) for length in (48, 800, 8000)] == [12, 200, 2000]


def test_layers_whose_window_no_sequence_has_outgrown_share_the_plan_of_those_without() -> None:
    sequences = PagedSequences([30, 12])

    plan = sequences.plan([(29, 30), (0, 12)], [0, 12, 29, 30, 4096])

    assert plan.by_window[30] is plan.by_window[4096] is plan.by_window[0]
    assert plan.by_window[29] is not plan.by_window[0]
    # Of the sequences of a shared plan, one that has not outgrown the window has no mask for it.
    assert [chunk.window for chunk in plan.by_window[12].chunks] == [0]
