"""Fakes of Baton's own ports: sessions, a registry, a KV network and a step runner, all in memory."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np

from baton.errors import BatonError, PeerLost
from baton.ports import WorkerInfo
from baton.v1 import common_pb2
from engine.batch import ForwardBatch, StepOutput
from engine.kv_cache import KVCache
from engine.model.tattletale import TattleTaleRunner, kv_of, next_token
from engine.step_runner import OnLayers
from engine.stored import DONE
from kvtransfer.contract import (
    Answer,
    AnsweredEarly,
    FirstToken,
    Gone,
    Offload,
    OutgoingFrame,
    Pairing,
    Peer,
    Ticket,
    TransferTarget,
)
from kvtransfer.receiver import IncomingWrite, KvReceiver

FINGERPRINT = common_pb2.Fingerprint(weights_id="w", tokenizer_id="t", num_layers=2, vocab_size=97)
GUARD_S = 10


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop run until the condition holds; fails after GUARD_S."""
    async with asyncio.timeout(GUARD_S):
        while not condition():
            await asyncio.sleep(0.001)


class MemorySession:
    """One end of a session. Messages travel as bytes, so that only what protobuf carries arrives."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.last_received = asyncio.get_running_loop().time()
        self.sent: list[Any] = []
        self._inbox: asyncio.Queue[tuple[type[Any], bytes] | None] = asyncio.Queue()
        self._other: MemorySession | None = None
        self.closed = False

    @classmethod
    def pair(cls, left_peer: str, right_peer: str) -> tuple[MemorySession, MemorySession]:
        left, right = cls(left_peer), cls(right_peer)
        left._other, right._other = right, left
        return left, right

    def send(self, message: Any) -> None:
        if self.closed or self._other is None or self._other.closed:
            raise PeerLost(f"the session with {self.peer} has ended")
        self.sent.append(message)
        self._other._inbox.put_nowait((type(message), message.SerializeToString()))

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (item := await self._inbox.get()) is not None:
            self.last_received = asyncio.get_running_loop().time()
            kind, data = item
            yield kind.FromString(data)
        if not self.closed:
            raise PeerLost(f"{self.peer} ended the session")

    async def close(self) -> None:
        self.cut()

    def cut(self) -> None:
        """Ends both directions at once; what was sent before still arrives at the other side."""
        if not self.closed and self._other is not None:
            self.closed = True
            self._inbox.put_nowait(None)
            self._other._inbox.put_nowait(None)


Serve = Callable[[MemorySession], Awaitable[None]]


class MemoryDialer:
    """Dials workers by name; each call runs the worker's serve() on the other end."""

    def __init__(self) -> None:
        self.workers: dict[str, Serve] = {}
        self.sessions: dict[str, list[MemorySession]] = {}

    @asynccontextmanager
    async def open(self, info: WorkerInfo) -> AsyncIterator[MemorySession]:
        if info.name not in self.workers:
            raise PeerLost(f"{info.name} does not answer")
        ours, theirs = MemorySession.pair(info.name, "router")
        self.sessions.setdefault(info.name, []).append(theirs)
        task = asyncio.create_task(self._serve(info.name, theirs), name=f"serve-{info.name}")
        try:
            yield ours
        finally:
            ours.cut()
            await asyncio.wait([task], timeout=GUARD_S)
            task.result()

    def cut(self, name: str) -> None:
        """Breaks every session of a worker."""
        for session in self.sessions.pop(name, []):
            session.cut()

    async def _serve(self, name: str, session: MemorySession) -> None:
        # As a server does: the handler's error ends the stream, and the peer hears no more than that.
        with suppress(BatonError):
            await self.workers[name](session)
        session.cut()


class FakeRegistry:
    """A registry that a test fills."""

    def __init__(self) -> None:
        self._infos: dict[str, WorkerInfo] = {}
        self._changes: list[asyncio.Event] = []

    def announce(self, info: WorkerInfo) -> None:
        self._infos[info.name] = info
        self._notify()

    def withdraw(self, name: str) -> None:
        self._infos.pop(name, None)
        self._notify()

    def forget_all(self) -> None:
        self._infos.clear()
        self._notify()

    async def register(self, info: WorkerInfo, ttl_s: float) -> None:
        self.announce(info)

    async def deregister(self, info: WorkerInfo) -> None:
        self.withdraw(info.name)

    async def watch(self) -> AsyncIterator[Sequence[WorkerInfo]]:
        change = asyncio.Event()
        self._changes.append(change)
        while True:
            yield tuple(self._infos.values())
            await change.wait()
            change.clear()

    def _notify(self) -> None:
        for change in self._changes:
            change.set()


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _at_once(function: Callable[[], Any]) -> Any:
    await asyncio.sleep(0)
    return function()


class KvNetwork:
    """A KvTransport that reaches the receivers of this process: by address, to pair, then by incarnation."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.receivers: dict[str, KvReceiver[Any]] = {}
        self.on_changed: Callable[[int, Pairing], None] = lambda _incarnation, _pairing: None
        self._addresses: dict[int, str] = {}
        self.now = _now
        # Set to hold every commit back, so that a test can act while it is under way.
        self.may_commit = asyncio.Event()
        self.may_commit.set()
        self.num_commits_waiting = 0
        # Where frames are read: on the loop, or on a thread as over a network.
        self.offload: Offload[Any] = _at_once

    @classmethod
    def to(cls, receiver: KvReceiver[Any], incarnation: int, now: Callable[[], float]) -> KvNetwork:
        """A network with one receiver, paired already."""
        network = cls()
        network.now = now
        network.receivers["memory"] = receiver
        network._addresses[incarnation] = "memory"
        return network

    def receiver(self, target: TransferTarget) -> KvReceiver[Any]:
        receiver = self.receivers.get(self._addresses.get(target.incarnation, ""))
        if receiver is None:
            raise PeerLost(f"cannot connect to {target.worker}")
        return receiver

    async def pair(self, peer: Peer) -> Pairing:
        if peer.address not in self.receivers:
            raise PeerLost(f"cannot connect to {peer.worker}")
        self._addresses[peer.incarnation] = peer.address
        return Pairing(transport="memory")

    async def part(self, incarnation: int) -> None:
        self._addresses.pop(incarnation, None)

    @asynccontextmanager
    async def open(self, ticket: Ticket, target: TransferTarget) -> AsyncIterator[NetworkWriter]:
        writer = NetworkWriter(self, ticket, target)
        try:
            yield writer
        finally:
            writer.close()

    async def close(self) -> None:
        pass


class NetworkWriter:
    """A KvWriter that calls the receiver directly, and fails once its worker is unplugged."""

    max_batch = 2
    wait_s = 0.0

    def __init__(self, network: KvNetwork, ticket: Ticket, target: TransferTarget) -> None:
        self._network = network
        self._target = target
        self._write = network.receiver(target).open(ticket, network.now(), lambda gone: None)

    async def prepare(self, frames: Sequence[OutgoingFrame]) -> list[tuple[bytes, bytes]]:
        return await self._network.offload(
            lambda: [(frame.header(), b"".join(frame.runs())) for frame in frames]
        )

    async def post(self, prepared: list[tuple[bytes, bytes]]) -> None:
        for header, payload in prepared:
            await asyncio.sleep(0)
            gone = self._admitted().frame(header, memoryview(payload), self._network.now())
            if gone is not None:
                raise AnsweredEarly(gone)

    async def commit(self, num_frames: int, first_token: FirstToken) -> Answer:
        await asyncio.sleep(0)
        self._network.num_commits_waiting += 1
        try:
            await self._network.may_commit.wait()
        finally:
            self._network.num_commits_waiting -= 1
        self._network.receiver(self._target)
        if not isinstance(self._write, IncomingWrite):
            return self._write
        return self._write.commit(num_frames, first_token, self._network.now())

    def close(self) -> None:
        if isinstance(self._write, IncomingWrite):
            self._write.close()

    def _admitted(self) -> IncomingWrite[Any]:
        self._network.receiver(self._target)
        if isinstance(self._write, Gone) or not isinstance(self._write, IncomingWrite):
            raise AnsweredEarly(self._write)
        return self._write


VOCAB = 97


def kv_rows(token_ids: Sequence[int], shape: tuple[int, ...], rope_step: int = 0) -> np.ndarray:
    """KV of a sequence by the rule of engine/model/tattletale.py, [T, *shape] int8; shape: L, 2, K, h."""
    rows = [b""]
    for position, token_id in enumerate(token_ids):
        rows.append(kv_of(rows[-1], token_id, position, math.prod(shape), rope_step))
    return np.frombuffer(b"".join(rows), np.int8).reshape(-1, *shape)


def expected_answer(
    prompt: Sequence[int],
    num_tokens: int,
    shape: tuple[int, ...],
    *,
    seed: int = 0,
    stop_token_ids: Sequence[int] = (),
    rope_steps: Sequence[int] = (),
) -> list[int]:
    """What an undisturbed generation yields, computed from the tokens alone; greedy without a seed.

    rope_steps: lengths up to which each scale serves; a longer sequence has all its KV at the next one.
    """
    step = bisect_left(rope_steps, len(prompt))
    kv, answer = kv_rows(prompt, shape, step), list[int]()
    while len(answer) < num_tokens:
        position = len(kv)
        token_id = next_token(kv, position, seed, VOCAB)
        answer.append(token_id)
        if token_id in stop_token_ids:
            break
        if bisect_left(rope_steps, len(kv) + 1) != step:
            step = bisect_left(rope_steps, len(kv) + 1)
            kv = kv_rows([*prompt, *answer], shape, step)
            continue
        row = kv_of(kv[-1].tobytes(), token_id, position, kv[-1].size, step)
        kv = np.concatenate([kv, np.frombuffer(row, np.int8).reshape(1, *shape)])
    return answer


class GatedRunner:
    """A StepRunner of the tattle-tale model: a test decides when steps may run, and whether they fail.

    may_end: cleared, steps store the KV of all their layers and then wait.
    """

    def __init__(self, cache: KVCache) -> None:
        self._runner = TattleTaleRunner(cache, VOCAB)
        self.may_run = asyncio.Event()
        self.may_run.set()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.num_steps = 0
        self.num_waiting = 0
        self.fail_with: Exception | None = None

    async def execute(self, batch: ForwardBatch, on_layers: OnLayers | None = None) -> StepOutput:
        self.num_waiting += 1
        await self.may_run.wait()
        self.num_waiting -= 1
        await asyncio.sleep(0)
        if self.fail_with is not None:
            raise self.fail_with
        for num_layers in self._runner.store_layers(batch):
            if on_layers is not None:
                on_layers(num_layers, DONE)
                await asyncio.sleep(0)
        await self.may_end.wait()
        self.num_steps += 1
        return self._runner.sample(batch)
