"""The prefill side of the transfer benchmark: computes prompts, and sends their KV.

A role of benchmarks/on_gpu/transfer_child.py. Owns the engine, its blocks and the sender.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from baton.limits import blocks_needed
from benchmarks.on_gpu.transfer_model import SIZES, make_runner
from benchmarks.on_gpu.transfer_socket import SocketTransport
from benchmarks.on_gpu.transfer_steps import Greedy, random_prompt
from benchmarks.on_gpu.transfer_stream import device_reader
from engine.block_pool import BlockPool
from engine.runner import ModelRunner
from engine.thread import EngineThread
from kvtransfer.contract import Committed, FirstToken, Peer, TransferTarget
from kvtransfer.event_thread import EventThread
from kvtransfer.sender import KvSender, KvSource, SenderConfig, Transfer, TransferOutcome
from kvtransfer.sender_thread import SenderThread
from kvtransfer.staged import StagedReader


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """What one model needs."""

    engine: EngineThread
    pool: BlockPool
    reader: StagedReader
    thread: SenderThread
    transport: SocketTransport
    events: EventThread
    sender: KvSender
    vocab_size: int

    async def close(self) -> None:
        await self.transport.close()
        self.thread.close()
        self.events.close()
        await self.engine.close()


class Role:
    """Its methods are the commands of the process."""

    def __init__(self) -> None:
        self._side: _Side | None = None

    async def load(
        self,
        *,
        size: str,
        device: str,
        num_tokens: int,
        chunk_tokens: int,
        frame_bytes: int,
        stall_s: float,
    ) -> int:
        """Makes a model and a cache of so many tokens in the place of those before. Returns num_blocks."""
        await self.close()
        if device == "cpu":
            torch.set_num_threads(1)

        def make() -> ModelRunner:
            runner = make_runner(SIZES[size], num_tokens, torch.device(device))
            runner.stage(chunk_tokens)
            return runner

        engine = await EngineThread.start(make)
        runner = engine.runner
        assert isinstance(runner, ModelRunner)
        shape = runner.cache.shape
        reader, thread = device_reader(runner, frame_bytes), SenderThread()
        events = EventThread(runner.cache.device)
        transport = SocketTransport(reader.format, thread)
        config = SenderConfig(max_frame_bytes=frame_bytes, stall_timeout_s=stall_s)
        self._side = _Side(
            engine=engine,
            pool=BlockPool(shape.num_blocks, shape.block_size),
            reader=reader,
            thread=thread,
            transport=transport,
            events=events,
            sender=KvSender(reader, transport, config, events=events),
            vocab_size=runner.model.config.vocab_size,
        )
        return shape.num_blocks

    async def pair(self, *, worker: str, incarnation: int, address: str) -> str:
        """Connects to the decode side; returns the transport's name."""
        peer = Peer(worker=worker, incarnation=incarnation, address=address)
        return (await self._loaded.transport.pair(peer)).transport

    async def compute(self, *, seed: int, num_tokens: int, chunk_tokens: int) -> dict[str, Any]:
        """Computes a prompt whose KV goes nowhere."""
        side = self._loaded
        async with self._blocks(num_tokens) as (greedy, _):
            return await _timed(greedy, random_prompt(seed, num_tokens, side.vocab_size), chunk_tokens)

    async def prefill(
        self,
        *,
        seed: int,
        num_tokens: int,
        chunk_tokens: int,
        frame_bytes: int,
        target: Mapping[str, Any],
        when: str,
    ) -> dict[str, Any]:
        """Computes a prompt and sends its KV: "meanwhile", or "after" it is computed.

        frame_bytes: most of one frame.  target: attempt and lease_id in hexadecimal, worker, incarnation.
        """
        side = self._loaded
        side.sender.config = replace(side.sender.config, max_frame_bytes=frame_bytes)
        prompt = random_prompt(seed, num_tokens, side.vocab_size)
        async with self._blocks(num_tokens) as (greedy, block_ids):
            source = KvSource(
                attempt_id=bytes.fromhex(target["attempt"]), block_ids=block_ids, num_tokens=num_tokens
            )
            done = None if when == "meanwhile" else await _timed(greedy, prompt, chunk_tokens)
            before = Counter(side.reader.counters)
            async with side.sender.transfer(source, _target(target)) as transfer:
                done = done or await _timed(greedy, prompt, chunk_tokens, transfer)
                token = FirstToken(token_id=done["token"], logprob=None, start_index=0)
                outcome = await transfer.commit(token)
            return {**done, **_sent(outcome), "counters": Counter(side.reader.counters) - before}

    @asynccontextmanager
    async def _blocks(self, num_tokens: int) -> AsyncIterator[tuple[Greedy, list[int]]]:
        """Blocks for a sequence. Whoever has them next does not find it there."""
        side = self._loaded
        block_ids = side.pool.allocate(blocks_needed(num_tokens, side.pool.block_size))
        greedy = Greedy(side.engine, block_ids)
        try:
            yield greedy, block_ids
        finally:
            await greedy.poison()
            side.pool.release(block_ids)

    async def ledger(self) -> dict[str, int]:
        """What is free and what is open; nothing is held if it is as after load()."""
        side = self._loaded
        return {
            "free_blocks": side.pool.num_free,
            "free_buffers": side.reader.num_free,
            "open_transfers": side.sender.num_open_transfers,
        }

    async def close(self) -> None:
        """Gives up the model. Idempotent."""
        side, self._side = self._side, None
        if side is not None:
            await side.close()

    @property
    def _loaded(self) -> _Side:
        assert self._side is not None, "load first"
        return self._side


async def _timed(
    greedy: Greedy, prompt: list[int], chunk_tokens: int, transfer: Transfer | None = None
) -> dict[str, Any]:
    """Computes a prompt, telling a transfer of it."""
    began = time.monotonic()
    if transfer is None:
        token_id = await greedy.compute(prompt, chunk_tokens)
    else:
        token_id = await greedy.compute(
            prompt, chunk_tokens, on_chunk=transfer.blocks_ready, on_layers=transfer.layers_ready
        )
    ended = time.monotonic()
    return {"token": token_id, "compute_s": ended - began, "computed_at": ended}


def _target(said: Mapping[str, Any]) -> TransferTarget:
    return TransferTarget(
        lease_id=bytes.fromhex(said["lease_id"]), worker=said["worker"], incarnation=said["incarnation"]
    )


def _sent(sent: TransferOutcome) -> dict[str, Any]:
    if not isinstance(sent.outcome, Committed):
        raise AssertionError(f"the transfer ended with {sent.outcome}")
    return {"num_bytes": sent.num_bytes, "duration_s": sent.duration_s}
