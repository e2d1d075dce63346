"""The stage among threads: one computes prompts and takes the stage, one waits for events, one reads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.kv_staging import KvStaging
from engine.stored import Stored
from kvtransfer.contract import Committed, GoneReason
from kvtransfer.event_thread import EventThread
from kvtransfer.sender import KvSender, SenderConfig, Transfer
from kvtransfer.staged import StagedReader
from tests.kvtransfer.device import Device, Event
from tests.kvtransfer.rig import TOKEN, Rig, make_cache, make_rig, target_of, until
from tests.kvtransfer.stage import now, receiving, sending
from tests.kvtransfer.staging import StagedPrompt

torch.set_num_threads(1)

NUM_LAYERS, NUM_TOKENS, NUM_RUNS = 4, 120, 24
# All 8 blocks of one layer.
FRAME_BYTES = 1 << 14


class Engine:
    """Its thread computes prompts, and later steps in the moment in which a frame is read."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._staging = KvStaging(rig.source.shape, NUM_TOKENS, "cpu", num_stages=1)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._num_reads = 0

    async def compute(self, transfer: Transfer) -> None:
        """The one step of a prompt: all layers are launched before the first one is there."""
        loop = asyncio.get_running_loop()
        tell = lambda *news: loop.call_soon_threadsafe(transfer.layers_ready, *news)  # noqa: E731
        await loop.run_in_executor(self._thread, self._step, tell)

    def _step(self, tell: object) -> None:
        assert callable(tell)
        prompt = StagedPrompt(self._staging, self._rig.source, self._rig.source_blocks, 0, NUM_TOKENS)
        assert prompt.rows is not None
        events = [Event() for _ in range(NUM_LAYERS)]
        for layer, event in enumerate(events):
            tell(layer + 1, Stored(event, prompt.rows.step))  # type: ignore[arg-type]
        for layer, event in enumerate(events):
            prompt.store(slice(layer, layer + 1))
            event.set()

    def overtake(self) -> None:
        """Called where a copy begins: now and then another step writes where it reads."""
        self._num_reads += 1
        if self._num_reads % 7 == 0:
            self._thread.submit(self._other_step).result()

    def _other_step(self) -> None:
        other = StagedPrompt(self._staging, self._rig.source, self._rig.source_blocks, 0, NUM_TOKENS)
        assert other.rows is not None
        other.rows.step.layers_Ln2Kbh.fill_(-1.0)

    def close(self) -> None:
        self._thread.shutdown()


@contextmanager
def engine_of(rig: Rig) -> Iterator[tuple[Engine, StagedReader]]:
    with closing(Engine(rig)) as engine:
        device = Device(at_begin=engine.overtake)
        yield engine, StagedReader(rig.source, FRAME_BYTES, stream=device)


@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_frames_come_from_the_stage_unless_a_later_step_has_taken_it(
    transport: str, tmp_path: Path
) -> None:
    rig = make_rig(make_cache(num_layers=NUM_LAYERS), make_cache(num_layers=NUM_LAYERS, layout="NHD"))
    with engine_of(rig) as (engine, reader), closing(_event_thread()) as events:
        async with (
            receiving(rig, tmp_path, slot_bytes=FRAME_BYTES) as receiver,
            sending(rig, tmp_path, transport, max_frame_bytes=FRAME_BYTES, reader=reader) as client,
        ):
            assert (await client.pair(receiver.peer)).transport == transport
            sender = KvSender(reader, client, SenderConfig(max_frame_bytes=FRAME_BYTES), events=events)
            for run in range(NUM_RUNS):
                rig.cache.logical.fill_(-1.0)
                lease = rig.reserve(b"%d" % run, NUM_TOKENS, now=now())
                async with sender.transfer(rig.kv_source(lease), target_of(lease)) as transfer:
                    await engine.compute(transfer)
                    # That the step has ended is heard of late, so that all of it went by layers.
                    await until(partial(rig.has_frames, NUM_LAYERS * (run + 1)))
                    assert (await transfer.commit(TOKEN)).outcome == Committed()
                assert rig.has_all(lease, lease.block_ids)
                rig.leases.release(lease.attempt_id, GoneReason.CANCELLED, now())
                rig.pool.release(lease.block_ids)
    counters = reader.counters
    assert counters["staged_frames"] >= NUM_RUNS
    assert counters["overtaken_frames"] >= NUM_RUNS // 4
    # A frame per layer, each from one place; what was overtaken came from the cache.
    assert counters["staged_frames"] + counters["cache_frames"] == NUM_RUNS * NUM_LAYERS
    assert counters["cache_frames"] == counters["overtaken_frames"]


def _event_thread() -> EventThread:
    return EventThread(torch.device("cpu"), stream=Device())
