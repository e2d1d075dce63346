"""The front of the first layer against fp64, over awkward shapes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from engine.kernels.choices import UNMEASURED
from engine.kernels.embed_rms_norm_qkv import (
    KERNEL,
    embed_rms_norm_qkv,
    embed_rms_norm_qkv_launch,
    embed_rms_norm_qkv_reference,
)
from engine.kernels.kernel import Config, Launch

GUARD = 7.0
EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Problem:
    token_ids: torch.Tensor
    embedding: torch.Tensor
    weight: torch.Tensor
    qkv: torch.Tensor
    bias: torch.Tensor | None
    scale: float = 1.0

    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float, torch.Tensor, torch.Tensor]:
        return self.token_ids, self.embedding, self.weight, EPS, self.qkv, self.bias

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """In fp64, by the formula."""
        hidden = self.embedding.double()[self.token_ids] * self.scale
        normed = hidden / (hidden.square().mean(-1, keepdim=True) + EPS).sqrt() * self.weight.double()
        qkv = normed @ self.qkv.double().T
        return hidden, qkv if self.bias is None else qkv + self.bias.double()


def problem(
    num_tokens: int, width: int, num_outputs: int, dtype: torch.dtype, *, has_bias: bool = False
) -> Problem:
    """Random; outputs are about 1. Tokens repeat."""
    torch.manual_seed(num_tokens)
    return Problem(
        token_ids=torch.randint(0, 5, (num_tokens,)),
        embedding=torch.randn(5, width).to(dtype),
        weight=torch.rand(width) + 0.5,
        qkv=(torch.randn(num_outputs, width) / width**0.5).to(dtype),
        bias=torch.randn(num_outputs).to(dtype) if has_bias else None,
        scale=1.7578125,
    )


def framed(num_rows: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A [num_rows, width] view, and the memory around it; all is full of GUARD."""
    memory = torch.full((num_rows + 2, width + 5), GUARD, dtype=dtype)
    return memory[1:-1, 2 : 2 + width], memory


def is_untouched(view: torch.Tensor, memory: torch.Tensor) -> bool:
    outside = memory.clone()
    outside[1:-1, 2 : 2 + view.shape[1]] = GUARD
    return bool((outside == GUARD).all())


def assert_right(hidden: torch.Tensor, qkv: torch.Tensor, given: Problem) -> None:
    expected_hidden, expected_qkv = given.expected()
    # The rounding of norms and results; their sums are of terms of either sign.
    tolerance = 4 * torch.finfo(qkv.dtype).eps
    torch.testing.assert_close(hidden.double(), expected_hidden, rtol=1e-6, atol=0)
    torch.testing.assert_close(qkv.double(), expected_qkv, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("num_tokens", "width", "num_outputs", "dtype"),
    [
        (0, 240, 400, torch.bfloat16),
        (1, 240, 400, torch.bfloat16),
        (1, 384, 864, torch.bfloat16),
        (15, 240, 400, torch.float16),
        (16, 17, 37, torch.bfloat16),
        (17, 240, 400, torch.bfloat16),
        (63, 1, 1, torch.float32),
        (63, 130, 70, torch.float32),
        (257, 240, 400, torch.bfloat16),
        (257, 100, 130, torch.float16),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_equals_fp64_and_touches_nothing_else(
    num_tokens: int, width: int, num_outputs: int, dtype: torch.dtype, has_bias: bool
) -> None:
    given = problem(num_tokens, width, num_outputs, dtype, has_bias=has_bias)
    hidden, hidden_memory = framed(num_tokens, width, torch.float32)
    qkv, qkv_memory = framed(num_tokens, num_outputs, dtype)

    UNMEASURED.run(embed_rms_norm_qkv_launch(*given.arguments(), hidden, qkv, embedding_scale=given.scale))

    assert_right(hidden, qkv, given)
    assert is_untouched(hidden, hidden_memory)
    assert is_untouched(qkv, qkv_memory)


def test_a_second_call_gives_the_same() -> None:
    given = problem(5, 40, 24, torch.bfloat16, has_bias=True)
    hidden, qkv = embed_rms_norm_qkv(*given.arguments())

    again = embed_rms_norm_qkv(*given.arguments())

    assert torch.equal(again[0], hidden)
    assert torch.equal(again[1], qkv)


@pytest.mark.parametrize("config", KERNEL.configs, ids=str)
def test_every_configuration_computes_the_same(config: Config) -> None:
    # More tiles of tokens than a group has with the smallest tiles, and more tiles of D than of O.
    given = problem(150, 300, 40, torch.float16, has_bias=True)
    hidden, qkv = torch.empty(150, 300), torch.empty(150, 40, dtype=torch.float16)

    embed_rms_norm_qkv_launch(*given.arguments(), hidden, qkv, embedding_scale=given.scale).run(config)

    assert_right(hidden, qkv, given)


def test_the_call_allocates_what_the_launch_takes() -> None:
    given = problem(3, 20, 8, torch.bfloat16)

    hidden, qkv = embed_rms_norm_qkv(*given.arguments(), embedding_scale=given.scale)

    assert (hidden.dtype, qkv.dtype) == (torch.float32, torch.bfloat16)
    assert_right(hidden, qkv, given)


def test_the_reference_is_fp64_rounded() -> None:
    given = problem(5, 60, 30, torch.bfloat16, has_bias=True)

    hidden, qkv = embed_rms_norm_qkv_reference(*given.arguments(), embedding_scale=given.scale)

    assert_right(hidden, qkv, given)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("size", "gain"), [(5.0, 400.0), (2**-14, 2**-18)])
def test_rows_of_any_size_survive_half_precision(dtype: torch.dtype, size: float, gain: float) -> None:
    # Unnormed, 5 * 60 * 400 is beyond fp16's 65,504 and 60 * 2^-14 * 2^-18 below half its smallest number.
    # Normed rows are 1.
    ids, ones = torch.zeros(2, dtype=torch.int64), torch.ones(1, 48)
    arguments = ((ones * size).to(dtype), torch.full((48,), gain), 1e-12, ones.to(dtype), None)

    hidden, qkv = embed_rms_norm_qkv(ids, *arguments, embedding_scale=60.0)

    assert (hidden == size * 60.0).all()
    expected = torch.full((2, 1), 48 * gain)
    torch.testing.assert_close(qkv.float(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_row_of_zeros_gives_the_bias(dtype: torch.dtype) -> None:
    # Zero times the reciprocal root of nothing but eps.
    bias = torch.arange(4.0).to(dtype)
    arguments = (torch.zeros(1, 20).to(dtype), torch.ones(20), EPS, torch.ones(4, 20).to(dtype), bias)

    _, qkv = embed_rms_norm_qkv(torch.zeros(1, dtype=torch.int64), *arguments)

    assert torch.equal(qkv, bias[None])


def test_a_row_that_is_not_finite_spoils_only_itself() -> None:
    embedding = torch.ones(3, 20).bfloat16()
    embedding[1, 3], embedding[2, 4] = torch.inf, torch.nan
    arguments = (embedding, torch.ones(20), EPS, torch.ones(4, 20).bfloat16(), None)

    _, qkv = embed_rms_norm_qkv(torch.tensor([0, 1, 2, 0]), *arguments)

    assert qkv.isnan().any(dim=1).tolist() == [False, True, True, False]
    assert qkv.isnan().all(dim=1).tolist() == [False, True, True, False]


def test_rows_beyond_32_bits_are_found() -> None:
    # Pages that nobody touches do not exist: 8 GB of addresses, a few pages of memory.
    stride = 2**30 + 8
    given = problem(3, 20, 8, torch.bfloat16)
    embedding = torch.empty(2 * stride + 20, dtype=torch.bfloat16).as_strided((3, 20), (stride, 1))
    embedding.copy_(given.embedding[:3])
    qkv = torch.empty(2 * stride + 8, dtype=torch.bfloat16).as_strided((3, 8), (stride, 1))
    hidden = torch.empty(3, 20)
    ids = torch.tensor([2, 0, 1])
    far = Problem(token_ids=ids, embedding=embedding, weight=given.weight, qkv=given.qkv, bias=None)

    UNMEASURED.run(embed_rms_norm_qkv_launch(*far.arguments(), hidden, qkv))

    assert_right(hidden, qkv, far)


@pytest.mark.parametrize(
    ("tokens", "dtype", "tiles"),
    [
        (16, "bfloat16", {16}),
        (64, "bfloat16", {64}),
        (256, "bfloat16", {64, 128}),
        (1024, "bfloat16", {64, 128}),
        (16, "float32", {16}),
        (64, "float32", {64}),
        (1024, "float32", {64}),
    ],
)
def test_tiles_suit_tokens_and_elements(tokens: int, dtype: str, tiles: set[int]) -> None:
    shape = (("width", 64), ("outputs", 64), ("tokens", tokens), ("dtype", dtype))

    assert {config.constants["BLOCK_T"] for config in KERNEL.configs_for(shape)} == tiles


def launch_on_meta(num_tokens: int, dtype: torch.dtype) -> Launch:
    def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    return embed_rms_norm_qkv_launch(
        meta(num_tokens, dtype=torch.int64),
        meta(9, 64, dtype=dtype),
        meta(64, dtype=torch.float32),
        EPS,
        meta(48, 64, dtype=dtype),
        None,
        meta(num_tokens, 64, dtype=torch.float32),
        meta(num_tokens, 48, dtype=dtype),
    )


@pytest.mark.parametrize(("num_tokens", "bucket"), [(1, 16), (16, 16), (17, 64), (257, 1024), (5000, 1024)])
def test_token_counts_share_choices(num_tokens: int, bucket: int) -> None:
    launch = launch_on_meta(num_tokens, torch.bfloat16)

    assert dict(launch.shape) == {
        "width": 64, "outputs": 48, "tokens": bucket, "bias": 0, "dtype": "bfloat16"
    }  # fmt: skip


def test_only_fp16_rows_are_read_twice() -> None:
    assert launch_on_meta(3, torch.float16).constants["NORM_FIRST"] is True
    assert launch_on_meta(3, torch.bfloat16).constants["NORM_FIRST"] is False
    assert launch_on_meta(3, torch.float32).constants["NORM_FIRST"] is False


def test_what_the_kernel_cannot_read_is_refused() -> None:
    ids, embedding, weight, qkv = torch.zeros(2).long(), torch.zeros(3, 4), torch.ones(4), torch.zeros(8, 4)
    for message, arguments in (
        ("token_ids must be int64", (ids.int(), embedding, weight, EPS, qkv, None)),
        ("weight must be float32", (ids, embedding, weight.half(), EPS, qkv, None)),
        ("one dtype", (ids, embedding.half(), weight, EPS, qkv, None)),
        ("one dtype", (ids, embedding, weight, EPS, qkv, torch.zeros(8).half())),
        ("4 columns", (ids, embedding[:, :3], weight, EPS, qkv, None)),
        ("bias must be", (ids, embedding, weight, EPS, qkv, torch.zeros(7))),
        ("contiguous rows", (ids, embedding, weight, EPS, torch.zeros(4, 8).T, None)),
    ):
        with pytest.raises(ValueError, match=message):
            embed_rms_norm_qkv(*arguments)
