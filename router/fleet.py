"""The workers a router knows: one link per incarnation, fed by the registry.

The registry only ever adds candidates. A link ends when its session does; it is
dialled again, with growing and jittered pauses, for as long as the registry
still announces that incarnation, unless it drains: who leaves is left alone.
Prefill and decode workers that are connected are introduced to each other, as KV may
go to nobody else.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from baton.errors import PeerLost
from baton.identity import Identity
from baton.logs import get_logger
from baton.ports import Registry, WorkerInfo
from baton.v1 import common_pb2
from router.attendance import Attendance
from router.decode_link import DecodeDialer, DecodeLink
from router.link import LinkObserver, WorkerLink
from router.prefill_link import PrefillDialer, PrefillLink

log = get_logger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0


class Fleet:
    """Links to all announced workers.

    prefill_dialer, decode_dialer: open a session with a worker of that role.
    needs_prefill: whether requests need a prefill worker; otherwise a decode worker is enough.
    observer: hears what workers say of their caches and steps.
    on_change: called whenever a worker's capacity or state may have changed.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        identity: Identity,
        prefill_dialer: PrefillDialer,
        decode_dialer: DecodeDialer,
        rng: random.Random,
        needs_prefill: bool,
        observer: LinkObserver,
        on_change: Callable[[], None],
    ) -> None:
        self.needs_prefill = needs_prefill
        self._observer = observer
        self._registry = registry
        self._identity = identity
        self._prefill_dialer = prefill_dialer
        self._decode_dialer = decode_dialer
        self._rng = rng
        self._on_change = on_change
        self._announced: dict[int, WorkerInfo] = {}
        self._links: dict[int, WorkerLink[Any, Any]] = {}
        # Those that have a session or are to have one.
        self._held: set[int] = set()
        self._attendance = Attendance()
        self._next_meeting = asyncio.Event()
        self._was_complete = asyncio.Event()
        self._present: tuple[list[PrefillLink], list[DecodeLink]] | None = None

    @property
    def links(self) -> list[WorkerLink[Any, Any]]:
        """All links, by name."""
        return sorted(self._links.values(), key=lambda link: link.name)

    @property
    def shown_links(self) -> list[WorkerLink[Any, Any]]:
        """All links but those to processes that are gone and back, under the same name, as another one."""
        back = {(link.role, link.name) for link in self._links.values() if link.is_connected}
        return [
            link
            for link in self.links
            if link.is_connected or link.state == "refused" or (link.role, link.name) not in back
        ]

    def prefill_links(self) -> list[PrefillLink]:
        """Prefill workers that take requests. Not to be changed."""
        return self._sorted_out()[0]

    def decode_links(self) -> list[DecodeLink]:
        """Decode workers that take requests. Not to be changed."""
        return self._sorted_out()[1]

    def is_alive(self, incarnation: int, after: float) -> bool:
        """Whether that very process is connected, or has left as it said, or was so after that time.

        After a lost session that means: only the session was lost, whatever has become of the process since.
        """
        link = self._links.get(incarnation)
        is_here = link is not None and link.is_alive
        return is_here or self._attendance.was_alive_after(incarnation, after)

    def went_at(self, role: common_pb2.Role.ValueType, num_tokens: int) -> float | None:
        """When the last of the workers that held so many tokens ceased to take requests; None if none did."""
        return self._attendance.went_at(role, num_tokens)

    async def meets(self, timeout_s: float) -> None:
        """Returns once a session has begun or ended, or after that time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._next_meeting.wait()

    def is_announced(self, incarnation: int) -> bool:
        """Whether the registry, when it was last heard, knew that very process."""
        return incarnation in self._announced

    @property
    def is_complete(self) -> bool:
        """Whether a request can be served: if it needs both roles, by workers that reach each other."""
        if not self.needs_prefill:
            return bool(self.decode_links())
        return any(
            prefill.can_reach(decode.incarnation)
            for prefill in self.prefill_links()
            for decode in self.decode_links()
        )

    async def completed(self) -> None:
        """Returns once the fleet has been complete for the first time."""
        await self._was_complete.wait()

    @property
    def is_staffed(self) -> bool:
        """Whether there is at least one worker of each role, be it that they cannot reach each other."""
        return bool(self.prefill_links() and self.decode_links())

    @property
    def is_pairing(self) -> bool:
        """Whether a prefill worker is still trying to reach a decode worker for the first time."""
        decodes = [link.incarnation for link in self.decode_links()]
        return any(link.is_trying(known) for link in self.prefill_links() for known in decodes)

    @property
    def shortage(self) -> str:
        """What a fleet that is not complete lacks, in words."""
        prefills, decodes = self.prefill_links(), self.decode_links()
        if not prefills or not decodes:
            missing = "decode" if prefills or not self.needs_prefill else "prefill"
            return f"no {missing} worker is connected; one that died is usually back in seconds"
        reason = prefills[0].why_not(decodes[0].info.incarnation)
        return f"no prefill worker can reach a decode worker: {reason}"

    async def run(self) -> None:
        """Follows the registry until cancelled."""
        async with asyncio.TaskGroup() as group:
            async for infos in self._registry.watch():
                self._announced = {info.incarnation: info for info in infos}
                self._forget_unannounced()
                for info in infos:
                    link = self._links.get(info.incarnation)
                    if link is None:
                        link = self._links[info.incarnation] = self._new_link(info)
                        if not link.is_draining:
                            self._held.add(info.incarnation)
                            group.create_task(self._hold(info.incarnation), name=f"link-{info.name}")
                    elif link.info != info:
                        link.announced(info)
                        self._present = None
                        self.changed()

    def changed(self) -> None:
        """A worker's capacity or state may have changed."""
        if not self._was_complete.is_set() and self.is_complete:
            self._was_complete.set()
        self._on_change()

    def met(self) -> None:
        """A session has begun or ended: prefill workers are told which decode workers there are."""
        self._present = None
        self._attendance.take(self._links.values(), asyncio.get_running_loop().time())
        self._next_meeting.set()
        self._next_meeting = asyncio.Event()
        present = {
            link.incarnation: link.introduction
            for link in self._links.values()
            if isinstance(link, DecodeLink) and link.is_connected
        }
        for link in self._links.values():
            if isinstance(link, PrefillLink) and link.is_connected:
                # A session that has just ended is mourned by its own link.
                with suppress(PeerLost):
                    link.introduce(present)

    def _sorted_out(self) -> tuple[list[PrefillLink], list[DecodeLink]]:
        """Those that take requests, by role; found once between two changes, as every placement asks."""
        if self._present is None:
            ready = [link for link in self._links.values() if link.is_ready]
            self._present = (
                [link for link in ready if isinstance(link, PrefillLink)],
                [link for link in ready if isinstance(link, DecodeLink)],
            )
        return self._present

    async def _hold(self, incarnation: int) -> None:
        """Holds sessions with a worker until it is not to be dialled any more."""
        pause_s, is_known_lost = FIRST_PAUSE_S, False
        while True:
            link = self._links[incarnation]
            await link.run(is_known_lost=is_known_lost)
            is_known_lost = True
            if link.was_ready:
                pause_s = FIRST_PAUSE_S
            if not self._is_wanted(link):
                break
            await asyncio.sleep(self._rng.uniform(0, pause_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            if not self._is_wanted(link):
                break
            self._links[incarnation] = self._new_link(self._announced[incarnation])
            # For operators it is lost, and why, until it answers.
            self._links[incarnation].state, self._links[incarnation].reason = link.state, link.reason
        self._held.remove(incarnation)
        self._forget_unannounced()

    def _is_wanted(self, link: WorkerLink[Any, Any]) -> bool:
        """Whether a worker whose session has ended is to be dialled again; a refused one has to restart."""
        return link.state != "refused" and not link.is_draining and link.incarnation in self._announced

    def _forget_unannounced(self) -> None:
        """A worker that is not dialled any more is shown for as long as it is announced."""
        for incarnation, link in list(self._links.items()):
            if incarnation not in self._announced and incarnation not in self._held:
                del self._links[incarnation]
                self._present = None
                self._observer.forgotten(incarnation)
                log.info("worker forgotten", worker=link.name)

    def _new_link(self, info: WorkerInfo) -> WorkerLink[Any, Any]:
        if info.role == "prefill":
            return PrefillLink(info, self._identity, self._prefill_dialer, self, self._observer)
        return DecodeLink(info, self._identity, self._decode_dialer, self, self._observer)
