"""Frames of a cache on a device: from a stage or from the cache, behind their event, in bounded memory."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from engine.kernels import block_copy
from engine.kernels.choices import UNMEASURED, Choices
from engine.kv_cache import KVCache
from engine.kv_staging import KvStaging
from engine.stored import DONE, Stored
from kvtransfer.contract import Committed, GoneReason
from kvtransfer.outgoing import CacheFrame, HostReader
from kvtransfer.sender import KvSender, SenderConfig
from kvtransfer.staged import StagedReader
from kvtransfer.wire import FrameSpec
from tests.kvtransfer.device import Device, fired
from tests.kvtransfer.rig import TOKEN, make_cache, make_rig, target_of, until
from tests.kvtransfer.staging import StagedPrompt

torch.set_num_threads(1)


class Late:
    """KV that is written some time after the event was handed out."""

    def __init__(self, cache: Any, value: float, delay_s: float) -> None:
        self.event = threading.Event()
        self._thread = threading.Timer(delay_s, self._write, (cache, value))
        self._thread.start()

    def _write(self, cache: Any, value: float) -> None:
        cache.logical.fill_(value)
        self.event.set()


def numbered(num_blocks: int, **options: Any) -> KVCache:
    """Every element of the cache is another number, exact in float32; float16 wraps around."""
    cache = make_cache(num_blocks, num_layers=4, **options)
    count = torch.arange(cache.data.numel(), dtype=torch.float32)
    limit = 2048 if cache.shape.dtype == torch.float16 else 1 << 24
    cache.data.copy_((count % limit).view(cache.data.shape))
    return cache


def spec_of(first_block: int, num_blocks: int, first_layer: int, num_layers: int) -> FrameSpec:
    return FrameSpec(
        index=0,
        first_block=first_block,
        num_blocks=num_blocks,
        num_tokens=16 * num_blocks,
        first_layer=first_layer,
        num_layers=num_layers,
    )


def by_layers(cache: KVCache, block_ids: tuple[int, ...], layers: range) -> bytes:
    """Blocks of the cache, first by layer, then by block, as they lie in memory."""
    pieces = [cache.data[block_id, layer].numpy().tobytes() for layer in layers for block_id in block_ids]
    return b"".join(pieces)


IDS = (5, 2, 7, 0, 11, 3, 9, 1, 6, 10)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("choices", [None, UNMEASURED], ids=["torch", "kernels"])
@pytest.mark.parametrize("num_blocks", [1, 3, 9], ids=lambda count: f"{count}_blocks")
def test_bytes_from_the_cache_are_those_of_the_host_reader(
    layout: str, choices: Choices | None, num_blocks: int
) -> None:
    cache = numbered(12, layout=layout)
    spec = spec_of(1, num_blocks, 1, 2)
    reader = StagedReader(cache, 1 << 16, choices, stream=Device())
    payload = reader.read(IDS, spec)
    assert b"".join(payload.runs) == b"".join(HostReader(cache).read(IDS, spec).runs)
    assert not payload.layers_first
    assert len(b"".join(payload.runs)) == num_blocks * 2 * 2 * 3 * 16 * 5 * 4
    assert reader.counters == {"staged_frames": 0, "cache_frames": 1, "overtaken_frames": 0}


@pytest.mark.parametrize(("num_blocks", "num_gathered"), [(8, 0), (9, 1)])
def test_only_many_blocks_are_gathered(
    num_blocks: int, num_gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[list[int]] = []

    def gather(cache: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, *, choices: Choices) -> None:
        gathered.append(ids.tolist())
        assert choices is UNMEASURED
        out.copy_(cache[ids])

    monkeypatch.setattr(block_copy, "gather_blocks", gather)
    cache, spec = numbered(12), spec_of(0, num_blocks, 0, 1)
    payload = StagedReader(cache, 1 << 16, UNMEASURED, stream=Device()).read(IDS, spec)
    assert b"".join(payload.runs) == by_layers(cache, IDS[:num_blocks], range(1))
    assert gathered == [list(IDS[:num_blocks])] * num_gathered


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_blocks_of_a_stage_are_read_layer_by_layer(layout: str, dtype: torch.dtype) -> None:
    cache = numbered(12, layout=layout, dtype=dtype)
    prompt = StagedPrompt(KvStaging(cache.shape, 160, "cpu"), cache, IDS, 0, 160)
    assert prompt.rows is not None
    prompt.store(slice(0, 4))
    expected = by_layers(cache, (2, 7, 0, 11), range(1, 4))
    cache.data.zero_()  # of what follows nothing comes from there
    device, event = Device(), fired()
    reader = StagedReader(cache, 1 << 16, stream=device)
    payload = reader.read(IDS, spec_of(1, 4, 1, 3), Stored(event, prompt.rows.step))
    assert device.waited_for == [event]
    assert payload.layers_first
    assert b"".join(payload.runs) == expected
    assert reader.counters == {"staged_frames": 1, "cache_frames": 0, "overtaken_frames": 0}


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (spec_of(0, 4, 0, 2), "the first block was begun by an earlier step"),
        (spec_of(1, 2, 0, 2), "as many blocks as layers: no fewer copies"),
        (spec_of(1, 1, 0, 4), "one block is one copy"),
    ],
    ids=["not_staged", "square", "one_block"],
)
def test_what_the_stage_lacks_or_does_not_ease_comes_from_the_cache(spec: FrameSpec, why: str) -> None:
    cache = numbered(12)
    prompt = StagedPrompt(KvStaging(cache.shape, 160, "cpu"), cache, IDS, 5, 160)
    assert prompt.rows is not None
    prompt.store(slice(0, 4))
    reader = StagedReader(cache, 1 << 16, stream=Device())
    payload = reader.read(IDS, spec, Stored(staged=prompt.rows.step))
    assert not payload.layers_first, why
    assert b"".join(payload.runs) == b"".join(HostReader(cache).read(IDS, spec).runs)
    assert reader.counters["cache_frames"] == 1


def test_a_stage_taken_while_it_is_copied_is_not_what_is_sent() -> None:
    cache = numbered(12)
    staging = KvStaging(cache.shape, 160, "cpu")
    prompt = StagedPrompt(staging, cache, IDS, 0, 160)
    assert prompt.rows is not None
    prompt.store(slice(0, 4))
    stage = prompt.rows.step.layers_Ln2Kbh

    def two_steps() -> None:
        """The stage is written again by the second one."""
        for _ in range(2):
            StagedPrompt(staging, cache, (4, 8), 0, 20)
        stage.fill_(-1.0)

    device = Device(two_steps)
    reader = StagedReader(cache, 1 << 16, stream=device)
    spec = spec_of(0, 4, 0, 2)
    payload = reader.read(IDS, spec, Stored(staged=prompt.rows.step))
    assert not payload.layers_first
    assert b"".join(payload.runs) == b"".join(HostReader(cache).read(IDS, spec).runs)
    assert reader.counters == {"staged_frames": 0, "cache_frames": 1, "overtaken_frames": 1}
    assert len(device.waited_for) == 2

    # A resend finds the stage gone, and does not copy from it.
    again = reader.read(IDS, spec, Stored(staged=prompt.rows.step))
    assert b"".join(again.runs) == b"".join(payload.runs)
    assert reader.counters == {"staged_frames": 0, "cache_frames": 2, "overtaken_frames": 2}
    assert len(device.waited_for) == 3


@pytest.mark.parametrize("receiver", [{"layout": "NHD"}, {"block_size": 32, "dtype": torch.float16}], ids=str)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
async def test_a_transfer_from_the_stage_arrives_by_logical_index(
    layout: str, receiver: dict[str, Any]
) -> None:
    rig = make_rig(make_cache(num_layers=4, layout=layout), make_cache(num_layers=4, **receiver))
    staging = KvStaging(rig.source.shape, 128, "cpu")
    # Of frames with 2 layers of 4 blocks; the first chunk of the prompt went block by block.
    reader = StagedReader(rig.source, 8 * 1920, stream=Device())
    sender = KvSender(reader, rig.network(), SenderConfig(max_frame_bytes=8 * 1920))
    lease = rig.reserve(b"a", 120)
    async with sender.transfer(rig.kv_source(lease), target_of(lease)) as transfer:
        transfer.blocks_ready(16)
        prompt = StagedPrompt(staging, rig.source, rig.source_blocks, 16, 120)
        assert prompt.rows is not None
        for num_layers in (2, 4):
            prompt.store(slice(num_layers - 2, num_layers))
            num_frames = rig.receiver.counters["frames"]
            transfer.layers_ready(num_layers, Stored(fired(), prompt.rows.step))
            await until(partial(rig.has_frames, num_frames + 2))
        assert (await transfer.commit(TOKEN)).outcome == Committed()
    assert rig.has_all(lease, lease.block_ids)
    assert sender.totals()["staged_frames"] == 4
    assert sender.totals()["overtaken_frames"] == 0


async def test_what_is_sent_is_what_the_event_stands_for_a_hundred_times() -> None:
    rig = make_rig(make_cache(num_layers=2), make_cache(num_layers=2))
    device = Device()
    reader = StagedReader(rig.source, 1 << 16, stream=device, num_buffers=2)
    sender = KvSender(reader, rig.network(), SenderConfig())
    rng = random.Random(1)
    for run in range(100):
        rig.source.logical.fill_(-1.0)
        late = Late(rig.source, float(run), rng.uniform(0, 0.004))
        lease = rig.reserve(b"%d" % run, 40)
        num_frames = rig.receiver.counters["frames"]
        async with sender.transfer(rig.kv_source(lease), target_of(lease)) as transfer:
            transfer.layers_ready(2, Stored(late.event))  # type: ignore[arg-type]
            await until(partial(rig.has_frames, num_frames + 1))
            assert late.event.is_set()
            assert (await transfer.commit(TOKEN)).outcome == Committed()
        assert rig.tokens_of(rig.cache, lease.block_ids, 40) == [[[[[float(run)] * 5] * 3] * 2] * 2] * 40
        rig.leases.release(lease.attempt_id, GoneReason.CANCELLED, 0.0)
        rig.pool.release(lease.block_ids)
    assert device.num_early > 0, "the reader was never there before the event"
    assert reader.num_free == 2


def test_without_a_free_buffer_the_reading_thread_waits_for_one() -> None:
    cache = make_cache()
    reader = StagedReader(cache, 1 << 16, stream=Device(), num_buffers=2)
    spec = spec_of(0, 1, 0, 2)
    frames = [CacheFrame(reader, (block_id,), spec) for block_id in range(3)]
    frames[0].runs()
    frames[1].runs()
    with ThreadPoolExecutor(1) as thread:
        third = thread.submit(frames[2].runs)
        with pytest.raises(TimeoutError):
            third.result(0.05)
        frames[0].release()
        frames[0].release()
        assert third.result(5)
    assert reader.num_free == 0
    for frame in frames[1:]:
        frame.release()
    assert reader.num_free == 2


def test_a_read_that_fails_gives_its_buffer_back() -> None:
    def broken() -> None:
        raise RuntimeError("the device is lost")

    reader = StagedReader(make_cache(), 1 << 16, stream=Device(broken), num_buffers=1)
    with pytest.raises(RuntimeError, match="the device is lost"):
        reader.read((0,), spec_of(0, 1, 0, 2), DONE)
    assert reader.num_free == 1
