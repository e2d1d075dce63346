"""Frames into a cache on a device: the same as into one in host memory, by kernels and by plain torch."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.limits import blocks_needed
from engine.kernels import block_copy
from engine.kernels.choices import UNMEASURED, Choices
from engine.kv_cache import KVCache
from kvtransfer.contract import Layout
from kvtransfer.device_writer import DeviceWriter, writer_of
from kvtransfer.scatter import BlockWriter, format_of
from kvtransfer.wire import Frame, FrameSpec
from tests.kvtransfer.rig import make_cache
from tests.kvtransfer.sent_tokens import (
    BLOCK_SIZES,
    KINDS,
    LAYERS,
    ORDERS,
    SENTINEL,
    SentTokens,
    cuts,
    expected,
    has_clean_gaps,
    source_format,
    target_cache,
)

torch.set_num_threads(1)

INF, NAN = float("inf"), float("nan")


class CpuStream:
    """Everything has ended when it is launched."""

    @contextmanager
    def behind(self, event: torch.cuda.Event | None) -> Iterator[None]:
        assert event is None
        yield


def writer(cache: KVCache, choices: Choices | None = None) -> DeviceWriter:
    return DeviceWriter(cache, choices, stream=CpuStream())


@dataclass(frozen=True)
class Case:
    """A sequence in frames of random rectangles and orders, into a cache of any stride."""

    seed: int
    num_tokens: int
    held: float
    block_sizes: tuple[int, int]
    kinds: tuple[tuple[str, Layout], tuple[str, Layout]]
    order: str
    has_large: bool

    def write(self, choices: Choices | None) -> tuple[KVCache, torch.Tensor, tuple[int, int]]:
        """The cache afterwards, what must be in it, and the saturated values, counted and expected."""
        rng = random.Random(self.seed)
        size, target_size = self.block_sizes
        fmt = source_format(size, *self.kinds[0])
        sent = SentTokens(fmt=fmt, num_tokens=self.num_tokens, has_large=self.has_large)
        num_blocks = blocks_needed(self.num_tokens, target_size)
        cache = target_cache(num_blocks + 2, target_size, *self.kinds[1], self.order)
        ids = rng.sample(range(num_blocks + 2), num_blocks)
        num_held = int(self.held * self.num_tokens)
        blocks = range(num_held // size, blocks_needed(self.num_tokens, size))
        parts = list(product(cuts(rng, blocks.start, blocks.stop), cuts(rng, 0, LAYERS)))
        rng.shuffle(parts)
        ours = writer(cache, choices)
        num_saturated = 0
        for index, part in enumerate(parts):
            frame = sent.frame(index, *part, layers_first=rng.random() < 0.5)
            num_saturated += ours.write(fmt, ids, frame, num_held_tokens=num_held)
        want, num_large = expected(sent, cache, ids, range(num_held, self.num_tokens))
        return cache, want, (num_saturated, num_large)


def cases(block_sizes: st.SearchStrategy[tuple[int, int]], max_tokens: int) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        seed=st.integers(0, 2**32),
        num_tokens=st.integers(1, max_tokens),
        held=st.one_of(st.just(0.0), st.floats(0, 1)),
        block_sizes=block_sizes,
        kinds=st.tuples(KINDS, KINDS),
        order=st.sampled_from(list(ORDERS)),
        has_large=st.booleans(),
    )


@settings(max_examples=80, deadline=None)
@given(case=cases(BLOCK_SIZES, 100))
def test_without_kernels_every_element_arrives_and_nothing_else_is_touched(case: Case) -> None:
    cache, want, (num_saturated, num_large) = case.write(None)
    torch.testing.assert_close(cache.logical.float(), want, rtol=0, atol=0)
    assert num_saturated == num_large
    assert has_clean_gaps(cache)


@settings(max_examples=40, deadline=None)
@given(case=cases(st.sampled_from([(4, 4), (7, 7), (16, 16), (16, 32)]), 60))
def test_with_kernels_every_element_arrives_and_nothing_else_is_touched(case: Case) -> None:
    cache, want, (num_saturated, num_large) = case.write(UNMEASURED)
    # The interpreter cuts bfloat16 where devices round.
    is_cut = (case.kinds[0][0], case.kinds[1][0]) == ("float32", "bfloat16")
    torch.testing.assert_close(cache.logical.float(), want, rtol=2**-7 if is_cut else 0, atol=0)
    assert num_saturated == num_large
    assert has_clean_gaps(cache)


def test_only_whole_blocks_are_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    whole: list[tuple[list[int], int]] = []

    def scatter(rows: torch.Tensor, ids: torch.Tensor, target: torch.Tensor, *, choices: Choices) -> None:
        whole.append((ids.tolist(), target.shape[1]))
        assert choices is UNMEASURED
        target[ids] = rows

    monkeypatch.setattr(block_copy, "scatter_blocks", scatter)
    sent = SentTokens(fmt=source_format(16, "float32", "HND"), num_tokens=75)
    cache = target_cache(5, 16, "float32", "HND", "as_built")
    # Tokens 20 to 74: of blocks 1 and 4 a part.
    frame = sent.frame(0, range(1, 5), range(1, 2))
    writer(cache, UNMEASURED).write(sent.fmt, [2, 4, 0, 3, 1], frame, num_held_tokens=20)
    assert whole == [([0, 3], 1)]
    assert bool((cache.logical[4, 1, :, :, :4] == SENTINEL).all())
    assert not bool((cache.logical[4, 1, :, :, 4:] == SENTINEL).any())
    assert bool((cache.logical[1, 1, :, :, 11:] == SENTINEL).all())
    assert bool((cache.logical[:, 0] == SENTINEL).all())


@pytest.mark.parametrize("choices", [None, UNMEASURED], ids=["torch", "kernels"])
@pytest.mark.parametrize("num_tokens", [4, 3], ids=["whole", "cut"])
def test_float32_beyond_float16_saturates_and_is_counted_but_nan_and_infinity_stay(
    choices: Choices | None, num_tokens: int
) -> None:
    # 65520 and above round to infinity in float16: its largest value is 65504, the next step 32 wide.
    values = [65504.0, 65519.0, 65520.0, -1e9, INF, -INF, NAN, 1.0, -65504.0, -65520.0, 3.4e38, -0.0]
    wanted = [65504.0, 65504.0, 65504.0, -65504.0, INF, -INF, NAN, 1.0, -65504.0, -65504.0, 65504.0, -0.0]
    cache, host = (
        make_cache(2, block_size=4, dtype=torch.float16, num_layers=1, num_kv_heads=1, head_dim=12)
        for _ in range(2)
    )
    fmt = dataclasses.replace(format_of(cache.shape), dtype="float32")
    spec = FrameSpec(index=0, first_block=0, num_blocks=1, num_tokens=num_tokens, first_layer=0, num_layers=1)
    frame = Frame(spec, memoryview(torch.tensor(values).repeat(8).numpy().tobytes()))
    num_saturated = writer(cache, choices).write(fmt, [1], frame)
    rows = cache.logical[1, 0, :, 0, :num_tokens].reshape(-1, 12)
    torch.testing.assert_close(rows, torch.tensor(wanted).half().expand_as(rows), equal_nan=True)
    assert torch.equal(
        rows.signbit()[:, [0, 3, 9, 11]], torch.tensor([False, True, True, True]).expand(len(rows), 4)
    )
    # Keys and values of each token, four values of each.
    assert num_saturated == 2 * num_tokens * 4
    assert BlockWriter(host).write(fmt, [1], frame) == num_saturated


def test_without_a_change_of_type_bits_stay() -> None:
    # Of NaNs too: quiet ones and others.
    bits = torch.tensor([0x7C01, 0x7E55, -0x3FF, 0x7C00, 0x0001, -0x8000], dtype=torch.int16)
    cache = make_cache(1, block_size=1, dtype=torch.float16, num_layers=1, num_kv_heads=1, head_dim=6)
    spec = FrameSpec(index=0, first_block=0, num_blocks=1, num_tokens=1, first_layer=0, num_layers=1)
    frame = Frame(spec, memoryview(bits.repeat(2).numpy().tobytes()))
    for choices in (None, UNMEASURED):
        cache.logical.zero_()
        assert writer(cache, choices).write(format_of(cache.shape), [0], frame) == 0
        assert cache.logical.view(torch.int16)[0, 0, :, 0, 0].tolist() == [bits.tolist()] * 2


def test_a_cache_in_host_memory_has_the_writer_of_host_memory() -> None:
    assert isinstance(writer_of(make_cache()), BlockWriter)
