"""The workers of one role: how many there shall be, which ones there are, and when there are none.

Owns the set of members and their tasks. A role is a subclass that names its classes. scale() and
drain() change the set at once and without waiting, so they cannot overtake each other.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from baton.drain import last_of_role
from baton.errors import InvalidRequest, Unavailable
from baton.logs import get_logger
from baton.pool.actor import WorkerActor
from baton.pool.config import MAX_WORKERS, PoolConfig
from baton.pool.member import Member, MemberSetup
from baton.pool.placer import Placer
from baton.pool.runtime import FoundWorker, Runtime, WorkerSpec
from baton.pool.state import State

_CHECK_EVERY_S = 1.0

log = get_logger(__name__)


class WorkerPool:
    """All workers of a role. `await start()`, then `run()` beside whatever asks; `await close()`.

    settings: an instance of the role's config, of which each worker gets its own name and log.
    """

    actor_class: ClassVar[type[WorkerActor]]

    def __init__(self, config: PoolConfig, settings: Any, runtime: Runtime, rng: random.Random) -> None:
        self._config = config
        self._settings = settings
        self._runtime = runtime
        self._members: dict[str, Member] = {}
        self._tasks: dict[Member, asyncio.Task[None]] = {}
        # Those that an earlier pool started with other settings.
        self._outdated: list[Member] = []
        self._news = asyncio.Event()
        self._setup = MemberSetup(
            runtime=runtime,
            placer=Placer(runtime, strategy=config.strategy, ask=config.ask(self.role)),
            start_timeout_s=config.start_timeout_s,
            drain_s=config.drain_s,
            unhealthy_s=config.unhealthy_s,
            rng=rng,
            changed=self._news.set,
        )

    @property
    def role(self) -> str:
        """Name of the role."""
        return self.actor_class.role.name

    @property
    def members(self) -> Sequence[Member]:
        """All members, those that leave or have failed among them, by index."""
        return sorted(self._members.values(), key=_index)

    async def start(self, num_workers: int) -> None:
        """Takes over what an earlier pool left, places the rest, and returns when that has started.

        Raises Unavailable if there is no room for it within placement_timeout_s, or a new worker cannot
        serve; ModelError or ConfigError if that is why. Those that were taken over, or that scale() has added
        meanwhile, are kept as after the start.
        """
        for found in await self._runtime.find(self.role):
            self._adopt(found)
        self._shrink(len(self._wanted) - num_workers)
        new = [self._members[name] for name in self._grow(num_workers - len(self._wanted))]
        for member in new:
            member.is_kept_up = False
        await self._until_up(new)
        for member in new:
            member.is_kept_up = True

    async def run(self) -> None:
        """Until cancelled; raises Unavailable when no worker is left and none can be started."""
        renewing = asyncio.create_task(self._renew_outdated(), name=f"renew {self.role} workers")
        try:
            while True:
                self._raise_if_over()
                if renewing.done():
                    renewing.result()
                await self._hear()
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)

    def scale(self, num_workers: int) -> tuple[list[str], list[str]]:
        """Sets how many workers there shall be; returns the names of those added and removed.

        Those that were given up are tried again.

        Raises InvalidRequest if num_workers is 0, or more than MAX_WORKERS.
        """
        if not 1 <= num_workers <= MAX_WORKERS:
            raise InvalidRequest(
                f"num_workers is {num_workers}; it must be 1 to {MAX_WORKERS} "
                "(drain with force removes the last)",
                field="num_workers",
            )
        removed = self._shrink(len(self._wanted) - num_workers)
        failed = [member.name for member in self._wanted if member.state is State.FAILED]
        for name in failed:
            self._add(name)
        return [*failed, *self._grow(num_workers - len(self._wanted))], removed

    def drain(self, member: Member, *, dry_run: bool, force: bool) -> int:
        """Removes a member after a drain; returns how many others serve.

        dry_run: only looks.

        Raises InvalidRequest if no other serves, unless force is given.
        """
        num_others = sum(other.state is State.SERVING and other is not member for other in self._wanted)
        if dry_run:
            return num_others
        if num_others == 0 and not force and member.state is not State.FAILED:
            raise last_of_role(self.role, member.name)
        self._remove(member)
        return num_others

    async def close(self, *, is_kept: bool = False) -> None:
        """Drains and removes all workers; returns when they are gone.

        is_kept: those that have come to serve are left to themselves instead, for the next pool.
        """
        for member in self.members:
            if is_kept and member.is_up:
                log.info("worker is left to the next pool", worker=member.name)
                member.forsake()
                self._tasks[member].cancel()
            else:
                self._remove(member)
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    async def _until_up(self, members: Sequence[Member]) -> None:
        """Until all of them that are still wanted have started; raises Unavailable if they cannot."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._config.placement_timeout_s
        while down := [member for member in members if not (member.is_up or member.is_leaving)]:
            self._raise_defects()
            self._raise_if_failed(down)
            waiting = [member for member in down if member.life.place is None]
            if waiting and loop.time() >= deadline_s:
                raise self._no_room(waiting)
            await self._hear()

    @property
    def _wanted(self) -> list[Member]:
        return [member for member in self.members if not member.is_leaving]

    def _grow(self, number: int) -> list[str]:
        """Adds workers at the lowest free indices."""
        added: list[str] = []
        index = 0
        while len(added) < number:
            name = f"{self.role}-{index}"
            if name not in self._members:
                self._add(name)
                added.append(name)
            index += 1
        return added

    def _shrink(self, number: int) -> list[str]:
        """Removes workers: first those that were given up, then the youngest."""
        by_worth = sorted(
            self._wanted, key=lambda member: (member.state is not State.FAILED, -_index(member))
        )
        chosen = by_worth[: max(number, 0)]
        for member in chosen:
            self._remove(member)
        return [member.name for member in chosen]

    def _add(self, name: str, found: FoundWorker | None = None) -> Member:
        """A new member; it takes the place of one that was given up."""
        if name in self._members:
            del self._tasks[self._members[name]]
        member = Member(self._spec(name), self._setup, found)
        self._members[name] = member
        task = asyncio.create_task(member.run(), name=f"keep {name}")
        self._tasks[member] = task
        task.add_done_callback(lambda _task: self._over(member))
        return member

    def _adopt(self, found: FoundWorker) -> None:
        member = self._add(found.facts.name, found)
        is_outdated = found.facts.digest != member.spec.digest
        if is_outdated:
            self._outdated.append(member)
        log.info("worker taken over", worker=member.name, pid=found.facts.pid, is_outdated=is_outdated)

    def _remove(self, member: Member) -> None:
        member.leave()
        if self._tasks[member].done():
            self._over(member)

    def _over(self, member: Member) -> None:
        """Forgets a member whose task has ended, unless it was given up and is still to be seen."""
        if (member.is_leaving or member.is_forsaken) and self._members.get(member.name) is member:
            del self._members[member.name]
            del self._tasks[member]
        self._news.set()

    async def _renew_outdated(self) -> None:
        """One after the other, so that the others serve meanwhile; no more once one does not come back."""
        for member in self._outdated:
            # One that has died meanwhile has new settings, or has been given up.
            if not member.is_up or member.num_restarts > 0:
                continue
            member.renew()
            await member.until_serving()
            if member.state is State.FAILED:
                log.error("no more workers are renewed", worker=member.name, reason=member.reason)
                return

    def _raise_if_over(self) -> None:
        self._raise_defects()
        wanted = self._wanted
        if wanted and all(member.state is State.FAILED for member in wanted):
            self._raise_if_failed(wanted)
        if wanted and self._runtime.is_gone and not any(member.is_up for member in wanted):
            raise Unavailable(
                f"Ray's control service has ended and no {self.role} worker is left; start the pool again"
            )

    def _raise_defects(self) -> None:
        """Nothing but a defect lets a member's task end with an error."""
        for task in self._tasks.values():
            if task.done() and not task.cancelled():
                task.result()

    def _raise_if_failed(self, members: Sequence[Member]) -> None:
        for member in members:
            if member.state is State.FAILED:
                raise member.error(f"{member.name} cannot serve: {member.reason}")

    def _no_room(self, waiting: Sequence[Member]) -> Unavailable:
        names = ", ".join(member.name for member in waiting)
        return Unavailable(
            f"Ray found no room for {names} within {self._config.placement_timeout_s:g} s: "
            f"{waiting[0].reason}; start fewer workers, ask for less, or add nodes"
        )

    async def _hear(self) -> None:
        """Until something has changed; not for ever, because a silence is no news."""
        try:
            async with asyncio.timeout(_CHECK_EVERY_S):
                await self._news.wait()
        except TimeoutError:
            return
        self._news.clear()

    def _spec(self, name: str) -> WorkerSpec:
        """What one worker needs to know: all settings, with its own name and log.

        One that is found was started with other settings too where its place would not be asked for now.
        """
        config, ask = self._config, self._setup.placer.ask
        own: dict[str, Any] = {"name": name, "ready_file": "", "drain_s": config.drain_s}
        if not config.ray_address:
            # On one machine there may be several of them.
            own["port"] = 0
        if config.log_dir:
            own["log_file"] = str(Path(config.log_dir) / f"{name}.log")
        settings = {
            field.name: getattr(self._settings, field.name) for field in dataclasses.fields(self._settings)
        } | own
        text = json.dumps([settings, dataclasses.asdict(ask)], sort_keys=True, default=str)
        return WorkerSpec(
            name=name,
            role=self.role,
            actor_class=self.actor_class,
            settings=settings,
            digest=hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
            ask=ask,
        )


def _index(member: Member) -> int:
    return int(member.name.rpartition("-")[2])
