"""A storm: many random transfers among two senders and two receivers, with everything that may go wrong.

Owns the requests and, as a router would, where they go, who dies, and what is tried again.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.errors import Overloaded, PeerLost
from kvtransfer.contract import FirstToken
from kvtransfer.lease_table import Lease
from tests.kvtransfer.storm_attempt import Course, Drive, Rules
from tests.kvtransfer.storm_receiver import Attempt, ReceiverSide
from tests.kvtransfer.storm_sender import Prompt, SenderSide
from tests.kvtransfer.storm_values import MAX_TOKENS, NUM_SEQUENCES

SENDERS = ("prefill-0", "prefill-1")
RECEIVERS = ("decode-0", "decode-1")
MAX_ATTEMPTS = 5


@dataclass(frozen=True, kw_only=True)
class StormSpec:
    """deaths_every: transfers between two deaths. max_frame_bytes: of a receiver's slots."""

    seed: int
    num_transfers: int
    num_at_once: int = 12
    deaths_every: int = 40
    max_frame_bytes: int = 1 << 14
    rules: Rules = field(default_factory=Rules)


class World(Protocol):
    """Where a storm happens: what carries the bytes, and what death means."""

    async def add_receiver(self, side: ReceiverSide) -> None: ...
    async def remove_receiver(self, side: ReceiverSide) -> None: ...
    def add_sender(self, side: SenderSide) -> None: ...
    async def pair(self, sender: SenderSide, receiver: ReceiverSide) -> None: ...
    async def kill_sender(self, side: SenderSide) -> None: ...
    def spawn(self, side: SenderSide, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]: ...
    def pause(self, side: SenderSide, seconds: float) -> bool: ...
    async def settle(self) -> list[str]: ...


class Storm:
    """One storm. `counts` says what happened, `defects` what must not have."""

    def __init__(self, spec: StormSpec, world: World) -> None:
        self.counts: Counter[str] = Counter()
        self.defects: list[str] = []
        self._spec = spec
        self._world = world
        self._rng = random.Random(spec.seed)
        self._num_layers = self._rng.choice((2, 3, 12))
        self._drive = Drive(spec.rules, self.counts, self.defects.append, world)
        self._senders: dict[str, SenderSide] = {}
        self._receivers: dict[str, ReceiverSide] = {}
        self._paired: set[tuple[int, int]] = set()
        self._indices = iter(range(spec.num_transfers))
        self._num_incarnations = 0
        self._is_dying: set[str] = set()

    async def run(self) -> None:
        """All transfers; then one from every sender to every receiver; then nothing may be left."""
        for name in RECEIVERS:
            await self._start_receiver(name)
        for name in SENDERS:
            await self._start_sender(name)
        async with asyncio.TaskGroup() as group:
            for _ in range(self._spec.num_at_once):
                group.create_task(self._work())
        if not self.defects:
            await self._end()

    async def _end(self) -> None:
        for sender in self._senders.values():
            for receiver in self._receivers.values():
                await self._calm(sender, receiver)
        self.defects += await self._world.settle()
        for sender in self._senders.values():
            self.counts += sender.reader.counters
            self.defects += sender.leftovers()
        for receiver in self._receivers.values():
            self.defects += receiver.leftovers()

    async def _work(self) -> None:
        for index in self._indices:
            rng = random.Random(f"{self._spec.seed}/{index}")
            if index % self._spec.deaths_every == self._spec.deaths_every - 1:
                await self._kill(rng)
            await self._request(index, rng)
            for receiver in self._receivers.values():
                self.counts["expired"] += receiver.expire()
                self.defects += receiver.defects()
            if self.defects:
                return

    async def _start_receiver(self, name: str) -> None:
        side = ReceiverSide(
            name,
            self._incarnation(),
            random.Random(self._rng.random()),
            num_layers=self._num_layers,
            ttl_s=self._spec.rules.ttl_s,
            complain=self.defects.append,
            counts=self.counts,
        )
        await self._world.add_receiver(side)
        self._receivers[name] = side
        for sender in list(self._senders.values()):
            await self._pair(sender, side)

    async def _start_sender(self, name: str) -> None:
        side = SenderSide(
            name,
            self._incarnation(),
            random.Random(self._rng.random()),
            num_layers=self._num_layers,
            max_frame_bytes=self._spec.max_frame_bytes,
            complain=self.defects.append,
        )
        self._world.add_sender(side)
        self._senders[name] = side
        for receiver in list(self._receivers.values()):
            await self._pair(side, receiver)

    def _incarnation(self) -> int:
        self._num_incarnations += 1
        return self._num_incarnations

    async def _pair(self, sender: SenderSide, receiver: ReceiverSide) -> None:
        try:
            await self._world.pair(sender, receiver)
        except PeerLost as error:
            if not (receiver.is_dead or sender.died.done()):
                self.defects.append(f"{sender.name} cannot pair with {receiver.name}: {error}")
        else:
            self._paired.add((sender.incarnation, receiver.incarnation))

    async def _kill(self, rng: random.Random) -> None:
        """One process dies in the middle of what it does, and comes back as somebody else."""
        name = rng.choice((*SENDERS, *RECEIVERS))
        if name in self._is_dying:
            return
        self._is_dying.add(name)
        if name in RECEIVERS:
            self.counts["death of a receiver"] += 1
            receiver = self._receivers[name]
            receiver.is_dead = True
            await self._world.remove_receiver(receiver)
            receiver.is_gone = True
            await self._start_receiver(name)
        else:
            self.counts["death of a sender"] += 1
            sender = self._senders[name]
            sender.died.set_result(None)
            self.counts += sender.reader.counters
            await self._world.kill_sender(sender)
            await self._start_sender(name)
        self._is_dying.discard(name)

    async def _calm(self, sender: SenderSide, receiver: ReceiverSide) -> None:
        """A transfer to which nothing is done."""
        prompt = sender.take(0, MAX_TOKENS)
        assert prompt is not None
        token = FirstToken(token_id=0, logprob=None, start_index=0)
        attempt = Attempt(f"{sender.name} {receiver.name}".encode(), prompt, token, receiver)
        lease = receiver.reserve(attempt, 0)
        assert isinstance(lease, Lease)
        await self._drive.run(attempt, lease, Course(rng=random.Random(0)), sender)
        sender.free(prompt)

    async def _request(self, index: int, rng: random.Random) -> None:
        """One sequence, until it is committed somewhere, cancelled for good, or given up."""
        sequence, num_tokens = rng.randrange(NUM_SEQUENCES), min(MAX_TOKENS, 1 + int(rng.expovariate(1 / 40)))
        sender, prompt = await self._take(rng, sequence, num_tokens)
        for number in range(MAX_ATTEMPTS):
            if sender.died.done():
                sender, prompt = await self._take(rng, sequence, num_tokens)
            attempt = await self._reserve(b"%d/%d" % (index, number), sender, prompt, rng)
            if attempt is None:
                self.counts["given up"] += 1
                break
            may_wait = index < 0.7 * self._spec.num_transfers
            course = Course.draw(rng, self._spec.rules, may_wait=may_wait)
            await self._drive.run(attempt, attempt.lease, course, sender)
            if attempt.is_committed and not attempt.receiver.is_dead:
                self.counts["committed"] += 1
                break
            if "cancelled" in attempt.excuses and rng.random() < 0.5:
                break
            self.counts["resume"] += 1
        self.counts["transfers"] += 1
        if not sender.died.done():
            sender.free(prompt)

    async def _take(self, rng: random.Random, sequence: int, num_tokens: int) -> tuple[SenderSide, Prompt]:
        """A living sender that has room, and the prompt's blocks there."""
        while True:
            sender = self._senders[rng.choice(SENDERS)]
            if not sender.died.done() and (prompt := sender.take(sequence, num_tokens)) is not None:
                return sender, prompt
            await asyncio.sleep(2 * self._spec.rules.pace_s)

    async def _reserve(
        self, attempt_id: bytes, sender: SenderSide, prompt: Prompt, rng: random.Random
    ) -> Attempt | None:
        """An attempt with a lease at a receiver that the sender is paired with; None if there is no room."""
        token = FirstToken(token_id=rng.randrange(1000), logprob=rng.choice((None, -0.25)), start_index=3)
        for _ in range(50):
            receiver = self._receivers[rng.choice(RECEIVERS)]
            if not receiver.is_dead and (sender.incarnation, receiver.incarnation) in self._paired:
                attempt = Attempt(attempt_id, prompt, token, receiver)
                lease = receiver.reserve(attempt, rng.choice((0, 0, 1, 3, MAX_TOKENS)))
                if isinstance(lease, Lease):
                    return attempt
                self.counts["refused"] += 1
                if not isinstance(lease.error, Overloaded):
                    self.defects.append(f"{attempt_id!r} was refused: {lease.error!r}")
            await asyncio.sleep(5 * self._spec.rules.pace_s * rng.random())
        return None
