"""Reading frames out of caches of any stride, against the logical index of every element."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.outgoing import CacheFrame, HostReader
from kvtransfer.wire import FrameSpec
from tests.kvtransfer.rig import make_cache

torch.set_num_threads(1)


def value_of(*index: int) -> float:
    """Distinct in every index, exact in float32."""
    block, layer, part, head, slot, dim = index
    return float(((((block * 7 + layer) * 2 + part) * 5 + head) * 40 + slot) * 9 + dim)


def fill(cache: Any) -> None:
    for index in np.ndindex(*cache.logical.shape):
        cache.logical[index] = value_of(*index)


def payload_of(cache: Any, block_ids: list[int], spec: FrameSpec, layout: str) -> np.ndarray:
    """By plain loops, what the wire's rule says: [N, L, 2, H, S, D], or heads and slots swapped."""
    _, _, _, heads, slots, dims = cache.logical.shape
    inner = (heads, slots) if layout == "HND" else (slots, heads)
    out = np.zeros((spec.num_blocks, spec.num_layers, 2, *inner, dims), np.float32)
    for n, layer, part, a, b, dim in np.ndindex(*out.shape):
        head, slot = (a, b) if layout == "HND" else (b, a)
        block = block_ids[spec.first_block + n]
        out[n, layer, part, a, b, dim] = value_of(block, spec.first_layer + layer, part, head, slot, dim)
    return out


def split_storage(num_blocks: int, num_layers: int, heads: int, *inner: int, layout: str) -> Any:
    """Blocks-first shape over storage that keeps all keys before all values."""
    slots, dims = inner
    store = torch.zeros(2, num_layers, num_blocks, heads, slots, dims)
    logical = store.permute(2, 1, 0, 3, 4, 5)
    shape = make_cache(
        num_blocks,
        block_size=slots,
        num_layers=num_layers,
        num_kv_heads=heads,
        head_dim=dims,
        layout=layout,
    ).shape
    return SimpleNamespace(shape=shape, logical=logical, device=torch.device("cpu"))


def padded(num_blocks: int, num_layers: int, heads: int, *inner: int, layout: str) -> Any:
    """Rows of a head one element longer than the head: no two dimensions merge."""
    slots, dims = inner
    store = torch.zeros(num_blocks, num_layers, 2, heads, slots + 1, dims + 1)
    logical = store[:, :, :, :, :slots, :dims]
    other = split_storage(num_blocks, num_layers, heads, slots, dims, layout=layout)
    return SimpleNamespace(shape=other.shape, logical=logical, device=torch.device("cpu"))


def plain(num_blocks: int, num_layers: int, heads: int, *inner: int, layout: str) -> Any:
    slots, dims = inner
    return make_cache(
        num_blocks,
        block_size=slots,
        num_layers=num_layers,
        num_kv_heads=heads,
        head_dim=dims,
        layout=layout,
    )


@pytest.mark.parametrize("make", [plain, split_storage, padded])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_frame_has_every_element_where_the_wire_says(make: Any, layout: str, data: st.DataObject) -> None:
    num_layers, heads = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    slots, dims = data.draw(st.sampled_from([1, 3, 7, 16])), data.draw(st.sampled_from([1, 2, 5]))
    cache = make(6, num_layers, heads, slots, dims, layout=layout)
    fill(cache)
    first_layer = data.draw(st.integers(0, num_layers - 1))
    spec = FrameSpec(
        index=0,
        first_block=data.draw(st.integers(0, 2)),
        num_blocks=data.draw(st.integers(1, 3)),
        num_tokens=1,
        first_layer=first_layer,
        num_layers=data.draw(st.integers(1, num_layers - first_layer)),
    )
    block_ids = data.draw(st.permutations(range(6)))
    frame = CacheFrame(HostReader(cache), block_ids, spec)
    expected = payload_of(cache, block_ids, spec, layout)
    assert b"".join(frame.runs()) == expected.tobytes()
    assert frame.num_bytes == expected.nbytes


def test_a_plain_cache_is_read_in_place_and_any_other_is_copied() -> None:
    spec = FrameSpec(index=0, first_block=0, num_blocks=2, num_tokens=8, first_layer=1, num_layers=1)
    cache = plain(4, 2, 2, 4, 3, layout="NHD")
    reader = HostReader(cache)
    runs = reader.read([3, 1], spec).runs
    cache.data.fill_(5.0)
    assert [np.frombuffer(run, np.float32).max() for run in runs] == [5.0, 5.0]
    assert reader.memory is not None
    assert reader.memory.nbytes == cache.shape.num_bytes
    assert HostReader(split_storage(4, 2, 2, 4, 3, layout="NHD")).memory is None
