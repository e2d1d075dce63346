"""The decode side of the transfer benchmark: takes KV into leased blocks, and goes on from there.

A role of benchmarks/on_gpu/transfer_child.py. Owns the engine, its blocks and leases, and the receiver. It
also does what a router would: it grants leases, and takes one back when its write ended before the commit.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from baton.limits import blocks_needed
from benchmarks.on_gpu.bare import digest_name
from benchmarks.on_gpu.transfer_model import SIZES, make_runner
from benchmarks.on_gpu.transfer_server import SocketServer
from benchmarks.on_gpu.transfer_steps import Greedy, random_prompt
from benchmarks.on_gpu.transfer_stream import device_writer
from engine.block_pool import BlockPool
from engine.runner import ModelRunner
from engine.thread import EngineThread
from kvtransfer.contract import FirstToken, GoneReason
from kvtransfer.lease_table import Lease, LeaseTable, Refusal
from kvtransfer.receiver import KvReceiver

_LEASE_S = 600.0


@dataclass(slots=True, eq=False)
class _Attempt:
    """committed: the first token.  ended: time.monotonic() when its write had ended without a commit."""

    num_tokens: int
    block_ids: list[int] = field(default_factory=list)
    committed: asyncio.Future[FirstToken] = field(default_factory=asyncio.Future)
    ended: asyncio.Future[float] = field(default_factory=asyncio.Future)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """What one model needs."""

    engine: EngineThread
    pool: BlockPool
    leases: LeaseTable[_Attempt]
    receiver: KvReceiver[_Attempt]
    server: SocketServer
    vocab_size: int

    async def close(self) -> None:
        await self.server.close()
        await self.engine.close()


class Role:
    """Its methods are the commands of the process."""

    def __init__(self) -> None:
        self._side: _Side | None = None
        self._attempts: dict[bytes, _Attempt] = {}
        self._kv_came: torch.Tensor | None = None

    async def load(self, *, size: str, device: str, num_tokens: int, address: str) -> dict[str, Any]:
        """Makes a model and a cache of so many tokens in the place of those before. Returns a peer."""
        await self.close()
        if device == "cpu":
            torch.set_num_threads(1)
        engine = await EngineThread.start(lambda: make_runner(SIZES[size], num_tokens, torch.device(device)))
        runner = engine.runner
        assert isinstance(runner, ModelRunner)
        shape = runner.cache.shape
        rng = random.SystemRandom()
        incarnation = rng.getrandbits(64)
        pool = BlockPool(shape.num_blocks, shape.block_size)
        leases: LeaseTable[_Attempt] = LeaseTable(pool, rng=rng, ttl_s=_LEASE_S)
        receiver = KvReceiver(
            leases,
            runner.cache,
            incarnation,
            on_committed=_committed,
            on_lost=lambda _lease, _reason: None,
            clock=time.monotonic,
            choices=runner.kernel_choices,
        )
        receiver.block_writer = device_writer(runner)
        self._side = _Side(
            engine=engine,
            pool=pool,
            leases=leases,
            receiver=receiver,
            server=SocketServer(receiver, Path(address), self._write_ended),
            vocab_size=runner.model.config.vocab_size,
        )
        return {"worker": "decode", "incarnation": incarnation, "address": address}

    async def digest(self) -> str:
        """What frames are verified with."""
        return digest_name()

    async def reserve(
        self, *, attempt: str, num_tokens: int, num_new: int, hold_after: int | None = None
    ) -> str:
        """A lease for a prompt and so many tokens behind it, in hexadecimal.

        hold_after: frames after which the others are left in the socket.
        """
        side = self._loaded
        self._attempts[bytes.fromhex(attempt)] = waiting = _Attempt(num_tokens)
        lease = side.leases.reserve(
            bytes.fromhex(attempt),
            waiting,
            num_blocks=blocks_needed(num_tokens + num_new, side.pool.block_size),
            num_tokens=num_tokens,
            now=_now(),
        )
        if isinstance(lease, Refusal):
            raise lease.error
        waiting.block_ids = lease.block_ids
        side.server.hold_after = hold_after
        return lease.lease_id.hex()

    async def arrived(self, *, attempt: str, num_frames: int) -> int:
        """Waits until so many frames are stored; returns how many are."""
        attempt_id = bytes.fromhex(attempt)
        await self._loaded.server.arrived(attempt_id, num_frames)
        return len(self._loaded.server.arrivals[attempt_id])

    async def answer(self, *, attempt: str, num_new: int, keeps_kv: bool) -> dict[str, Any]:
        """Waits for the commit, computes that many tokens, the first one among them, and gives all back.

        keeps_kv: for the next alone() to compare its own with.
        """
        side, attempt_id = self._loaded, bytes.fromhex(attempt)
        waiting = self._attempts[attempt_id]
        first = await waiting.committed
        lease = side.leases.get(attempt_id)
        assert lease is not None, "nobody has released it"
        greedy = Greedy(side.engine, lease.block_ids)
        try:
            self._kv_came = await greedy.kv(waiting.num_tokens) if keeps_kv else None
            began = time.monotonic()
            tokens = await greedy.decode(first.token_id, waiting.num_tokens, num_new)
            ended = time.monotonic()
        finally:
            side.leases.release(attempt_id, GoneReason.CANCELLED, _now())
            await greedy.poison()
            side.pool.release(lease.block_ids)
        return {
            "tokens": tokens,
            "decode_s": ended - began,
            "arrivals": side.server.arrivals.pop(attempt_id),
        }

    async def lost(self, *, attempt: str) -> dict[str, Any]:
        """Reads what was held, and waits for the end of the write; returns when it was noticed."""
        side = self._loaded
        side.server.release()
        waiting = self._attempts[bytes.fromhex(attempt)]
        either: list[asyncio.Future[Any]] = [waiting.ended, waiting.committed]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.ended.done():
            return {"at": None}
        await Greedy(side.engine, waiting.block_ids).poison()
        return {"at": waiting.ended.result()}

    async def alone(self, *, seed: int, num_tokens: int, chunk_tokens: int, num_new: int) -> dict[str, Any]:
        """The same prompt and tokens, all computed here; and how far the KV that came and was kept is off."""
        side = self._loaded
        block_ids = side.pool.allocate(blocks_needed(num_tokens + num_new, side.pool.block_size))
        greedy = Greedy(side.engine, block_ids)
        try:
            prompt = random_prompt(seed, num_tokens, side.vocab_size)
            first = await greedy.compute(prompt, chunk_tokens)
            tokens = await greedy.decode(first, num_tokens, num_new)
            came, self._kv_came = self._kv_came, None
            kv_error = 0.0 if came is None else _distance(await greedy.kv(num_tokens), came)
            return {"tokens": tokens, "kv_error": kv_error}
        finally:
            await greedy.poison()
            side.pool.release(block_ids)

    async def ledger(self) -> dict[str, int]:
        """What is free, leased and open; nothing is held if it is as after load()."""
        side = self._loaded
        return {
            "free_blocks": side.pool.num_free,
            "used_blocks": side.pool.num_used,
            "leases": side.leases.num_leases,
            "reserved_blocks": side.leases.num_reserved_blocks,
            "open_writes": side.receiver.num_open_writes,
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

    def _write_ended(self, attempt_id: bytes, failure: BaseException | None) -> None:
        waiting = self._attempts[attempt_id]
        if waiting.committed.done():
            return
        self._loaded.leases.abort_if_uncommitted(attempt_id, _now())
        if failure is not None:
            waiting.committed.set_exception(failure)
        waiting.ended.set_result(time.monotonic())


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Of the two elements that are furthest apart; infinite where any is not finite."""
    distance = float((one.float() - other.float()).abs().max())
    return distance if math.isfinite(distance) else math.inf


def _committed(lease: Lease[_Attempt], token: FirstToken) -> None:
    lease.payload.committed.set_result(token)


def _now() -> float:
    return asyncio.get_running_loop().time()
