"""One attempt in a storm: what will be done to it, the sender's side of it, and what may come of it.

Owns the judgement: an attempt commits, unless something happened to it that excuses it; and then it
ends as that says.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from baton.errors import KvTransferFailed, PeerLost
from engine.stored import DONE, Stored
from kvtransfer.contract import Committed, Gone, GoneReason, TransferTarget
from kvtransfer.lease_table import Lease, LeaseState
from kvtransfer.sender import KvSource, Transfer, TransferOutcome
from tests.kvtransfer.faults import FAULTS
from tests.kvtransfer.staging import StagedPrompt
from tests.kvtransfer.storm_receiver import Attempt
from tests.kvtransfer.storm_sender import Faults, Prompt, SenderSide

# A frame that is damaged this often may be given up; both ends allow three resends.
TOO_OFTEN = 4
DAMAGES = ("drop", "corrupt")
EXCUSES = {
    GoneReason.CANCELLED: {"cancelled"},
    GoneReason.EXPIRED: {"expired", "paused"},
    GoneReason.CORRUPT: {"damaged"},
    # Its tombstone was forgotten while the sender slept.
    GoneReason.UNKNOWN: {"paused"},
}


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How often what is done, and the times of a storm, in seconds.

    pace_s: about what a step of computing takes. attempt_s: about what an attempt takes. *_share: of
        the attempts.
    """

    pace_s: float = 0.001
    attempt_s: float = 0.008
    ttl_s: float = 2.0
    stall_timeout_s: float = 0.5
    fault_share: float = 0.5
    stall_share: float = 0.15
    cancel_share: float = 0.25
    expire_share: float = 0.02
    pause_share: float = 0.02
    hang_s: float = 60.0


@dataclass(kw_only=True)
class Course:
    """What is done to one attempt; nothing by default.

    cancel: "release", "leave" or "both", after cancel_s. expire: the state in which its time passes.
    """

    rng: random.Random
    faults: dict[int, str] = field(default_factory=dict)
    cancel: str = ""
    cancel_s: float = 0.0
    expire: str = ""
    pause_s: float = 0.0

    @classmethod
    def draw(cls, rng: random.Random, rules: Rules, *, may_wait: bool) -> Course:
        """may_wait: whether there is enough left to be done meanwhile, if it shall expire."""
        course = cls(rng=rng)
        if rng.random() < 0.01:
            # More often than anybody sends a frame again.
            course.faults = dict.fromkeys(range(rng.randrange(4), 200), rng.choice(DAMAGES))
        elif rng.random() < rules.fault_share:
            kinds = FAULTS if rng.random() < rules.stall_share else FAULTS[:4]
            count = rng.choice((1, 1, 2, 3, 8))
            course.faults = {min(int(rng.expovariate(0.2)), 40): rng.choice(kinds) for _ in range(count)}
        if rng.random() < rules.cancel_share:
            course.cancel = rng.choice(("release", "leave", "both"))
            course.cancel_s = rng.choice((0, 1, 1, 1)) * rng.expovariate(1 / rules.attempt_s)
        elif may_wait and rng.random() < rules.expire_share:
            course.expire = rng.choice(("reserved", "receiving", "committed"))
        elif rng.random() < rules.pause_share:
            course.pause_s = rng.uniform(0.1, 4.0)
        return course


class Drive:
    """Drives attempts of one storm."""

    def __init__(
        self, rules: Rules, counts: Counter[str], complain: Callable[[str], None], world: Any
    ) -> None:
        self._rules = rules
        self._counts = counts
        self._complain = complain
        self._world = world

    async def run(self, attempt: Attempt, lease: Lease[Attempt], course: Course, sender: SenderSide) -> None:
        """Sends, perhaps twice into the same lease, and sees to it that the lease ends."""
        with self._cancelling(attempt, lease, course):
            await self._run(attempt, lease, course, sender)

    @contextmanager
    def _cancelling(self, attempt: Attempt, lease: Lease[Attempt], course: Course) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(course.cancel_s, self._cancel, attempt, lease, course)
        yield
        timer.cancel()

    async def _run(self, attempt: Attempt, lease: Lease[Attempt], course: Course, sender: SenderSide) -> None:
        receiver = attempt.receiver
        if course.expire == "reserved":
            await self._let_expire(attempt)
        await self._send_once(attempt, lease, course, sender)
        is_possible = lease.is_uncommitted and not receiver.is_dead and not sender.died.done()
        if is_possible and course.rng.random() < 0.3 and not attempt.excuses & {"expired", "paused"}:
            self._counts["same lease again"] += 1
            attempt.excuses.clear()
            attempt.num_damaged = 0
            receiver.leases.renew([attempt.attempt_id], receiver.now())
            await self._send_once(attempt, lease, Course(rng=course.rng), sender)
        if attempt.is_committed:
            await self._decode(attempt, lease, course)
        elif not receiver.is_dead and receiver.leases.get(attempt.attempt_id) is lease:
            receiver.cancel(attempt.attempt_id)

    async def _let_expire(self, attempt: Attempt) -> None:
        attempt.excuses.add("expired")
        await asyncio.sleep(self._rules.ttl_s + 2 * self._rules.pace_s)
        if not attempt.receiver.is_dead:
            self._counts["expired"] += attempt.receiver.expire()

    async def _decode(self, attempt: Attempt, lease: Lease[Attempt], course: Course) -> None:
        receiver = attempt.receiver
        await asyncio.sleep(self._rules.pace_s * course.rng.randint(0, 10))
        if course.expire == "committed":
            await self._let_expire(attempt)
        if not receiver.is_dead and receiver.leases.get(attempt.attempt_id) is lease:
            if course.expire == "committed":
                self._complain(f"{attempt.attempt_id!r} outlived its lease")
            receiver.cancel(attempt.attempt_id)

    async def _send_once(
        self, attempt: Attempt, lease: Lease[Attempt], course: Course, sender: SenderSide
    ) -> None:
        def happened(fault: str) -> None:
            self._counts[fault] += 1
            attempt.num_damaged += fault in DAMAGES
            attempt.excuses |= {fault} & {"stall", "cut"}

        loop = asyncio.get_running_loop()
        began = loop.time()
        faults = Faults(course.faults, happened)
        sender.transport.faults[attempt.attempt_id] = (faults, course.rng.randrange(1 << 20))
        task = attempt.task = self._world.spawn(sender, self._send(attempt, course, sender))
        # What it ends with counts, unless its sender has died: then nobody asks.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        if course.pause_s and self._world.pause(sender, course.pause_s):
            self._counts["pause"] += 1
        done, _ = await asyncio.wait(
            [task, sender.died], timeout=self._rules.hang_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            self._complain(f"{attempt.attempt_id!r} hangs: {task}")
        self._excuse(attempt, sender, began)
        if task in done:
            del sender.transport.faults[attempt.attempt_id]
            self._judge(attempt, lease, task)
        elif not attempt.is_committed and not attempt.excuses:
            self._complain(f"{attempt.attempt_id!r} did not end")

    def _excuse(self, attempt: Attempt, sender: SenderSide, began: float) -> None:
        reasons = {
            "sender died": sender.died.done(),
            "receiver died": attempt.receiver.is_dead,
            "paused": sender.paused_until >= began,
            "damaged": attempt.num_damaged >= TOO_OFTEN,
        }
        attempt.excuses |= {reason for reason, holds in reasons.items() if holds}

    def _cancel(self, attempt: Attempt, lease: Lease[Attempt], course: Course) -> None:
        receiver = attempt.receiver
        has_lease = lease.state is not LeaseState.RELEASED and not receiver.is_dead
        if course.cancel in ("release", "both") and has_lease:
            self._counts[f"cancelled {lease.state.value}"] += 1
            attempt.excuses.add("cancelled")
            receiver.cancel(attempt.attempt_id)
        if course.cancel in ("leave", "both") and attempt.task is not None and not attempt.task.done():
            self._counts["sender left" if course.cancel == "leave" else "both left"] += 1
            attempt.excuses.add("left")
            attempt.task.cancel()

    async def _send(self, attempt: Attempt, course: Course, sender: SenderSide) -> TransferOutcome:
        prompt = attempt.prompt
        source = KvSource(
            attempt_id=attempt.attempt_id, block_ids=prompt.block_ids, num_tokens=prompt.num_tokens
        )
        target = TransferTarget(
            lease_id=attempt.lease.lease_id,
            worker=attempt.receiver.name,
            incarnation=attempt.receiver.incarnation,
            num_held_tokens=attempt.num_held,
        )
        prompt.begin(attempt.num_held)
        with sender.lending(prompt):
            async with sender.sender.transfer(source, target) as transfer:
                transfer.blocks_ready(prompt.num_computed)
                await self._compute(prompt, transfer, course.rng, sender)
                if course.expire == "receiving":
                    await self._let_expire(attempt)
                return await transfer.commit(attempt.token)

    async def _compute(
        self, prompt: Prompt, transfer: Transfer, rng: random.Random, sender: SenderSide
    ) -> None:
        chunk = rng.choice((10, 40, 200))
        while prompt.num_computed < prompt.num_tokens:
            end = min(prompt.num_tokens, prompt.num_computed + rng.randint(1, chunk))
            if end == prompt.num_tokens and rng.random() < 0.5:
                await self._compute_layers(prompt, transfer, rng, sender.stage(prompt))
            else:
                prompt.store(end)
            prompt.num_computed = end
            if rng.random() < 0.8:
                transfer.blocks_ready(end)
            await self._pause(rng)

    async def _compute_layers(
        self, prompt: Prompt, transfer: Transfer, rng: random.Random, staged: StagedPrompt | None
    ) -> None:
        self._counts["by layers"] += 1
        stored = DONE
        if staged is not None and staged.rows is not None:
            stored = Stored(staged=staged.rows.step)
        for layer in range(prompt.shape.num_layers):
            prompt.store(prompt.num_tokens, slice(layer, layer + 1))
            if staged is not None:
                staged.store(slice(layer, layer + 1))
            if rng.random() < 0.7:
                transfer.layers_ready(layer + 1, stored)
                await self._pause(rng)

    async def _pause(self, rng: random.Random) -> None:
        await asyncio.sleep(self._rules.pace_s * rng.choice((0, 0, 0, 1, 3)) * rng.random())

    def _judge(self, attempt: Attempt, lease: Lease[Attempt], task: asyncio.Task[TransferOutcome]) -> None:
        """Whether what the sender was told is true, and an attempt that failed has an excuse."""
        name, excuses = attempt.attempt_id, attempt.excuses
        if task.cancelled():
            if not excuses & {"left", "sender died"}:
                self._complain(f"{name!r} was cancelled by nobody")
        elif (error := task.exception()) is not None:
            allowed = {"stall", "cut", "damaged", "paused", "receiver died", "sender died"}
            if not isinstance(error, PeerLost | KvTransferFailed) or not excuses & allowed:
                self._complain(f"{name!r} with {excuses} failed: {error!r}")
        else:
            outcome = task.result().outcome
            self._counts[f"told {outcome}"] += 1
            if isinstance(outcome, Committed) != attempt.is_committed:
                self._complain(
                    f"{name!r} is committed: {attempt.is_committed}; the sender was told {outcome}"
                )
            if isinstance(outcome, Gone) and not excuses & EXCUSES.get(outcome.reason, set()):
                self._complain(f"{name!r} with {excuses} was told {outcome}")
        if not attempt.is_committed and not excuses:
            self._complain(f"{name!r} did not commit, for no reason; its lease is {lease.state}")
