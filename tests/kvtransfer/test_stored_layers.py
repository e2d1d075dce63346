"""What a frame waits for, while the device is layers behind those who launch them."""

from __future__ import annotations

import asyncio
from contextlib import closing
from functools import partial

import pytest
import torch

from engine.stored import DONE, Stored
from kvtransfer.contract import Committed
from kvtransfer.event_thread import EventThread
from kvtransfer.sender import KvSender, SenderConfig, Transfer
from kvtransfer.sender_thread import SenderThread
from kvtransfer.staged import StagedReader
from kvtransfer.stored_layers import StoredLayers
from tests.kvtransfer.device import Device, Event
from tests.kvtransfer.rig import TOKEN, Rig, make_cache, make_rig, target_of, until

torch.set_num_threads(1)

NUM_LAYERS = 10
# One block of one layer: keys and values, 3 heads, 16 tokens, 5 dims, 4 bytes.
CELL_BYTES = 2 * 3 * 16 * 5 * 4


def stored_of(event: object, staged: object = None) -> Stored:
    return Stored(event, staged)  # type: ignore[arg-type]


def test_a_frame_waits_for_the_first_news_that_has_its_last_layer() -> None:
    layers, news = StoredLayers(), {number: stored_of(object()) for number in (2, 3, 7)}
    for number, stored in news.items():
        layers.add(number, stored)
    assert layers.num_layers == 7
    found = [layers.before(end) for end in range(1, 8)]
    assert found == [news[2], news[2], news[3], news[7], news[7], news[7], news[7]]


def test_what_was_told_is_not_told_again() -> None:
    layers, first = StoredLayers(), stored_of(object())
    layers.add(2, first)
    layers.add(2, DONE)
    layers.add(1, DONE)
    assert layers.num_layers == 2
    assert (layers.before(1), layers.before(2)) == (first, first)


def test_once_the_step_has_ended_there_is_nothing_to_wait_for() -> None:
    layers, staged = StoredLayers(), object()
    assert layers.after() == DONE
    layers.add(1, stored_of(object(), staged))
    assert layers.after() == stored_of(None, staged)


class Launched:
    """A prompt whose layers a host launches all at once, on a device that a test lets go on."""

    def __init__(
        self, *, has_event_thread: bool, max_frame_bytes: int = 1 << 16, stall_s: float = 5.0
    ) -> None:
        self.rig: Rig = make_rig(make_cache(num_layers=NUM_LAYERS), make_cache(num_layers=NUM_LAYERS))
        self._kv = self.rig.source.logical.clone()
        self.device, self.watched = Device(), Device()
        self.events = [Event() for _ in range(NUM_LAYERS)]
        self.thread = SenderThread()
        self._event_thread = EventThread(torch.device("cpu"), stream=self.watched)
        network = self.rig.network()
        network.offload = self.thread
        self.sender = KvSender(
            StagedReader(self.rig.source, max_frame_bytes, stream=self.device),
            network,
            SenderConfig(max_frame_bytes=max_frame_bytes, stall_timeout_s=stall_s),
            events=self._event_thread if has_event_thread else None,
        )

    def launch(self, transfer: Transfer) -> None:
        """Nothing of it is computed yet."""
        self.rig.source.logical.fill_(-1.0)
        for layer, event in enumerate(self.events):
            transfer.layers_ready(layer + 1, stored_of(event))

    def compute(self, layer: int) -> None:
        self.rig.source.logical[:, layer] = self._kv[:, layer]
        self.events[layer].set()

    def close(self) -> None:
        for event in self.events:
            event.set()
        self.thread.close()
        self._event_thread.close()


@pytest.mark.parametrize("has_event_thread", [False, True], ids=["reader_waits", "event_thread_waits"])
async def test_each_layer_travels_as_soon_as_the_device_has_computed_it(has_event_thread: bool) -> None:
    with closing(Launched(has_event_thread=has_event_thread)) as made:
        rig = made.rig
        lease = rig.reserve(b"a", 40)
        async with made.sender.transfer(rig.kv_source(lease), target_of(lease)) as transfer:
            made.launch(transfer)
            for layer in range(NUM_LAYERS):
                made.compute(layer)
                # No event of a later layer has fired: this one has waited for none of them.
                await until(partial(rig.has_frames, layer + 1))
                assert rig.receiver.counters["frames"] == layer + 1
            # Its step has not ended.
            assert not rig.committed
            outcome = await transfer.commit(TOKEN)
        assert outcome.outcome == Committed()
        assert outcome.hidden_share == 1.0
        assert rig.has_all(lease, lease.block_ids)
        assert made.device.waited_for == made.events
        assert made.device.num_early == 0 or not has_event_thread


async def test_a_chunk_that_is_computed_does_not_wait_for_the_next_one() -> None:
    # Two blocks of the first chunk, each a frame; of the second chunk nothing is computed.
    with closing(Launched(has_event_thread=True, max_frame_bytes=NUM_LAYERS * CELL_BYTES)) as made:
        rig = made.rig
        lease = rig.reserve(b"a", 80)
        async with made.sender.transfer(rig.kv_source(lease), target_of(lease)) as transfer:
            transfer.blocks_ready(64)
            made.launch(transfer)
            await until(partial(rig.has_frames, 4))
            assert made.device.waited_for == [None] * 4
            for layer in range(NUM_LAYERS):
                made.compute(layer)
            assert (await transfer.commit(TOKEN)).outcome == Committed()


async def test_a_transfer_that_waits_for_the_device_holds_up_no_other() -> None:
    with closing(Launched(has_event_thread=True)) as made:
        rig = made.rig
        late, other = rig.reserve(b"a", 40), rig.reserve(b"b", 40)
        async with made.sender.transfer(rig.kv_source(late), target_of(late)) as transfer:
            made.launch(transfer)
            await until(lambda: made.watched.waited_for == made.events[:1])
            async with made.sender.transfer(rig.kv_source(other), target_of(other)) as quick:
                assert (await quick.commit(TOKEN)).outcome == Committed()
            assert rig.committed == [("b", TOKEN)]
            for layer in range(NUM_LAYERS):
                made.compute(layer)
            assert (await transfer.commit(TOKEN)).outcome == Committed()
        assert rig.has_all(late, late.block_ids)


async def test_a_step_that_takes_longer_than_a_stall_is_none() -> None:
    with closing(Launched(has_event_thread=True, stall_s=0.2)) as made:
        rig = made.rig
        lease = rig.reserve(b"a", 40)
        async with made.sender.transfer(rig.kv_source(lease), target_of(lease)) as transfer:
            made.launch(transfer)
            await asyncio.sleep(0.3)
            for layer in range(NUM_LAYERS):
                made.compute(layer)
            assert (await transfer.commit(TOKEN)).outcome == Committed()
        assert rig.has_all(lease, lease.block_ids)


async def test_a_transfer_ends_at_once_though_its_device_does_not_go_on() -> None:
    with closing(Launched(has_event_thread=True)) as made:
        rig = made.rig
        lease = rig.reserve(b"a", 40)
        async with made.sender.transfer(rig.kv_source(lease), target_of(lease)) as transfer:
            made.launch(transfer)
            await until(lambda: made.watched.waited_for == made.events[:1])
        assert not made.events[0].is_set()
        assert made.sender.num_open_transfers == rig.receiver.num_open_writes == 0
        assert made.device.waited_for == []
