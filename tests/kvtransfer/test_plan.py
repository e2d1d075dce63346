"""How sequences are cut into frames, against a count of (block, layer) cells."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.contract import KvFormat
from kvtransfer.plan import FramePlan
from tests.kvtransfer.rig import plan_frames

# 2 x 2 heads x 16 tokens x 8 dims x 4 bytes = 2,048 bytes per block and layer.
FORMAT = KvFormat(dtype="float32", layout="HND", block_size=16, num_layers=3, num_kv_heads=2, head_dim=8)


def ranges(frames: list) -> list[tuple[int, int, int, int, int]]:
    return [(f.first_block, f.num_blocks, f.num_tokens, f.first_layer, f.num_layers) for f in frames]


def test_small_blocks_share_a_frame() -> None:
    frames = plan_frames(FORMAT, num_tokens=70, max_frame_bytes=2 * 3 * 2048)
    assert ranges(frames) == [(0, 2, 32, 0, 3), (2, 2, 32, 0, 3), (4, 1, 6, 0, 3)]
    assert [frame.index for frame in frames] == [0, 1, 2]


def test_a_block_larger_than_a_frame_is_split_along_its_layers() -> None:
    frames = plan_frames(FORMAT, num_tokens=16, max_frame_bytes=2 * 2048)
    assert ranges(frames) == [(0, 1, 16, 0, 2), (0, 1, 16, 2, 1)]


def test_frames_are_filled_rather_than_split_along_one_block() -> None:
    # Six cells of a block in a layer, two to a frame: three frames, none half empty.
    frames = plan_frames(FORMAT, num_tokens=20, max_frame_bytes=2 * 2048)
    assert ranges(frames) == [(0, 2, 20, 0, 1), (0, 2, 20, 1, 1), (0, 2, 20, 2, 1)]


def test_one_block_of_one_layer_is_the_smallest_frame() -> None:
    frames = plan_frames(FORMAT, num_tokens=16, max_frame_bytes=1)
    assert ranges(frames) == [(0, 1, 16, 0, 1), (0, 1, 16, 1, 1), (0, 1, 16, 2, 1)]


def test_blocks_wholly_held_do_not_travel() -> None:
    assert ranges(plan_frames(FORMAT, num_tokens=50, num_held_tokens=32)) == [(2, 2, 18, 0, 3)]
    assert ranges(plan_frames(FORMAT, num_tokens=50, num_held_tokens=31)) == [(1, 3, 34, 0, 3)]
    assert plan_frames(FORMAT, num_tokens=50, num_held_tokens=50) == []


def test_more_held_than_there_is_is_an_error() -> None:
    with pytest.raises(ValueError, match="num_held_tokens is 51"):
        plan_frames(FORMAT, num_tokens=50, num_held_tokens=51)


def test_only_whole_blocks_go_before_the_last_chunk() -> None:
    plan = FramePlan(FORMAT, num_tokens=50)
    assert plan.advance(15) == []
    assert ranges(plan.advance(33)) == [(0, 2, 32, 0, 3)]
    assert plan.advance(47) == []
    assert not plan.is_complete
    assert ranges(plan.advance(50)) == [(2, 2, 18, 0, 3)]
    assert plan.is_complete
    assert [frame.index for frame in plan.frames] == [0, 1]


@given(
    num_tokens=st.integers(1, 200),
    held=st.floats(0, 1),
    steps=st.lists(st.integers(0, 220), max_size=8),
    max_frame_bytes=st.integers(1, 40_000),
    block_size=st.sampled_from([1, 7, 16, 32]),
)
def test_every_cell_not_held_travels_exactly_once_after_it_is_computed(
    num_tokens: int, held: float, steps: list[int], max_frame_bytes: int, block_size: int
) -> None:
    fmt = KvFormat(
        dtype="bfloat16", layout="NHD", block_size=block_size, num_layers=3, num_kv_heads=2, head_dim=8
    )
    num_held_tokens = int(held * num_tokens)
    plan = FramePlan(
        fmt, num_tokens=num_tokens, num_held_tokens=num_held_tokens, max_frame_bytes=max_frame_bytes
    )
    cells: Counter[tuple[int, int]] = Counter()
    computed = 0
    for step in [*steps, num_tokens]:
        computed = max(computed, step)
        for frame in plan.advance(computed):
            assert frame.first_block * block_size + frame.num_tokens <= min(computed, num_tokens)
            size = frame.num_blocks * frame.num_layers * 2 * 2 * 8 * block_size * 2
            assert size <= max_frame_bytes or (frame.num_blocks, frame.num_layers) == (1, 1)
            cells.update(
                (frame.first_block + block, frame.first_layer + layer)
                for block in range(frame.num_blocks)
                for layer in range(frame.num_layers)
            )
    needed = {
        (token // block_size, layer) for token in range(num_held_tokens, num_tokens) for layer in range(3)
    }
    assert cells == Counter(needed)
    assert [frame.index for frame in plan.frames] == list(range(len(plan.frames)))


def test_the_last_chunk_is_cut_by_layers_while_it_is_computed() -> None:
    plan = FramePlan(FORMAT, num_tokens=50)
    assert ranges(plan.advance(20)) == [(0, 1, 16, 0, 3)]
    # Block 1 has tokens of the chunk before; they travel with the last one.
    assert ranges(plan.advance(20, 1)) == [(1, 3, 34, 0, 1)]
    assert plan.advance(20, 1) == []
    assert ranges(plan.advance(20, 2)) == [(1, 3, 34, 1, 1)]
    assert not plan.is_complete
    assert ranges(plan.advance(50)) == [(1, 3, 34, 2, 1)]
    assert plan.is_complete


def test_layers_go_in_at_most_ten_groups_and_none_waits_for_a_full_one_at_the_end() -> None:
    fmt = KvFormat(dtype="float32", layout="HND", block_size=16, num_layers=32, num_kv_heads=2, head_dim=8)
    plan = FramePlan(fmt, num_tokens=10)
    sizes = []
    for num_layers in range(1, 33):
        sizes += [frame.num_layers for frame in plan.advance(0, num_layers)]
    assert sizes == [4] * 8
    plan = FramePlan(fmt, num_tokens=10)
    assert [frame.num_layers for frame in plan.advance(0, 7)] == [4]
    # All of these at once: each group waits for its own last layer only.
    assert [(frame.first_layer, frame.num_layers) for frame in plan.advance(0, 31)] == [
        (4, 4), (8, 4), (12, 4), (16, 4), (20, 4), (24, 4)
    ]  # fmt: skip
    assert [frame.num_layers for frame in plan.advance(10)] == [4]


@pytest.mark.parametrize(("num_layers", "last"), [(32, [4] * 7), (30, [3] * 9), (22, [3] * 6 + [1])])
def test_of_a_step_that_has_been_launched_every_group_is_cut_by_itself(
    num_layers: int, last: list[int]
) -> None:
    fmt = dataclasses.replace(FORMAT, num_layers=num_layers)
    plan = FramePlan(fmt, num_tokens=10)
    group = plan.advance(0, 5)
    assert len(group) == 1
    assert [frame.num_layers for frame in plan.advance(0, num_layers)] == last
    assert plan.is_complete
    # What the step has stored when it ends is there at once.
    plan = FramePlan(fmt, num_tokens=10)
    plan.advance(0, 5)
    assert [frame.num_layers for frame in plan.advance(10)] == [num_layers - group[0].num_layers]


@given(data=st.data())
def test_every_cell_is_cut_once_whatever_becomes_ready_when(data: st.DataObject) -> None:
    num_layers = data.draw(st.integers(1, 23))
    block_size = data.draw(st.integers(1, 9))
    num_tokens = data.draw(st.integers(1, 60))
    held = data.draw(st.integers(0, num_tokens))
    fmt = KvFormat(
        dtype="bfloat16",
        layout="NHD",
        block_size=block_size,
        num_layers=num_layers,
        num_kv_heads=1,
        head_dim=2,
    )
    max_frame_bytes = data.draw(st.integers(1, 4000))
    plan = FramePlan(fmt, num_tokens=num_tokens, num_held_tokens=held, max_frame_bytes=max_frame_bytes)
    computed = 0
    while computed < num_tokens and data.draw(st.booleans()):
        computed = data.draw(st.integers(computed, num_tokens - 1))
        plan.advance(computed)
    layers = 0
    while layers < num_layers and data.draw(st.booleans()):
        layers = data.draw(st.integers(layers + 1, num_layers))
        for frame in plan.advance(computed, layers):
            # Nothing may be sent that is not there yet.
            end = frame.first_block * block_size + frame.num_tokens
            assert frame.first_layer + frame.num_layers <= layers or end <= computed
    plan.advance(num_tokens)
    assert plan.is_complete
    cells = Counter(
        (block, layer)
        for frame in plan.frames
        for block in range(frame.first_block, frame.first_block + frame.num_blocks)
        for layer in range(frame.first_layer, frame.first_layer + frame.num_layers)
    )
    first = num_tokens if held == num_tokens else held // block_size * block_size
    blocks = range(first // block_size, -(-num_tokens // block_size)) if first < num_tokens else range(0)
    assert cells == Counter({(block, layer): 1 for block in blocks for layer in range(num_layers)})
    smallest = fmt.layer_block_bytes
    assert all(frame.payload_bytes(fmt) <= max(max_frame_bytes, smallest) for frame in plan.frames)
