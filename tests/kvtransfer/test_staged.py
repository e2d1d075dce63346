"""Frames of a cache on a device: read behind their event, through a bounded number of buffers."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from kvtransfer.contract import Committed, GoneReason
from kvtransfer.outgoing import CacheFrame, HostReader
from kvtransfer.sender import KvSender, SenderConfig
from kvtransfer.staged import StagedReader
from kvtransfer.wire import FrameSpec
from tests.kvtransfer.rig import TOKEN, make_cache, make_rig, target_of, until

torch.set_num_threads(1)


class Device:
    """A device whose writes take effect late: what a step stores is there when its event has fired."""

    def __init__(self) -> None:
        self.num_early = 0

    def __call__(
        self, source: torch.Tensor, block_ids: Sequence[int], target: torch.Tensor, stored: Any
    ) -> None:
        if stored is not None:
            self.num_early += not stored.is_set()
            assert stored.wait(5)
        gathered = source[list(block_ids)].contiguous()
        target.copy_(gathered.view(torch.uint8).reshape(-1))


class Late:
    """KV that is written some time after the event was handed out."""

    def __init__(self, cache: Any, value: float, delay_s: float) -> None:
        self.event = threading.Event()
        self._thread = threading.Timer(delay_s, self._write, (cache, value))
        self._thread.start()

    def _write(self, cache: Any, value: float) -> None:
        cache.logical.fill_(value)
        self.event.set()


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_staged_bytes_are_those_of_the_host_reader(layout: str) -> None:
    cache = make_cache(layout=layout, num_layers=4)
    cache.data.copy_(torch.arange(cache.data.numel()).view(cache.data.shape))
    spec = FrameSpec(index=0, first_block=1, num_blocks=3, num_tokens=48, first_layer=1, num_layers=2)
    staged = StagedReader(cache, 1 << 16, gather=Device()).read((5, 2, 7, 0), spec)
    host = HostReader(cache).read((5, 2, 7, 0), spec)
    assert b"".join(staged.runs) == b"".join(host.runs)
    assert len(b"".join(staged.runs)) == 3 * 2 * 2 * 3 * 16 * 5 * 4


async def test_what_is_sent_is_what_the_event_stands_for_a_hundred_times() -> None:
    rig = make_rig(make_cache(num_layers=2), make_cache(num_layers=2))
    device = Device()
    reader = StagedReader(rig.source, 1 << 16, gather=device, num_buffers=2)
    sender = KvSender(reader, rig.network(), SenderConfig())
    rng = random.Random(1)
    for run in range(100):
        rig.source.logical.fill_(-1.0)
        late = Late(rig.source, float(run), rng.uniform(0, 0.004))
        lease = rig.reserve(b"%d" % run, 40)
        num_frames = rig.receiver.counters["frames"]
        async with sender.transfer(rig.kv_source(lease), target_of(lease)) as transfer:
            transfer.layers_ready(2, late.event)  # type: ignore[arg-type]
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
    reader = StagedReader(cache, 1 << 16, gather=Device(), num_buffers=2)
    spec = FrameSpec(index=0, first_block=0, num_blocks=1, num_tokens=16, first_layer=0, num_layers=2)
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
    def broken(*_: object) -> None:
        raise RuntimeError("the device is lost")

    reader = StagedReader(make_cache(), 1 << 16, gather=broken, num_buffers=1)
    spec = FrameSpec(index=0, first_block=0, num_blocks=1, num_tokens=16, first_layer=0, num_layers=2)
    with pytest.raises(RuntimeError, match="the device is lost"):
        reader.read((0,), spec)
    assert reader.num_free == 1
