"""The decode workers that KV may go to: paired when a router names them, parted when none does any more.

Owns one task per decode worker, which pairs and, where that fails, tries again until it
succeeds or is refused. Must not know requests, or how a transport works.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from baton.errors import BatonError, IncompatiblePeer, InternalError, PeerLost
from baton.logs import get_logger
from kvtransfer.contract import KvTransport, Pairing, Peer
from kvtransfer.metrics import SendMetrics

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0

log = get_logger(__name__)

PairState = Pairing | BatonError


@dataclass(slots=True, eq=False)
class _Pair:
    """One decode worker. sessions: those whose routers named it."""

    peer: Peer
    task: asyncio.Task[None]
    sessions: set[int] = field(default_factory=set)
    state: PairState | None = None
    doubted: asyncio.Event = field(default_factory=asyncio.Event)


class Pairs:
    """All decode workers that some router has named.

    tell: called with (session id, incarnation, state) whenever a pair's state is new to a session.
    """

    def __init__(
        self,
        transport: KvTransport,
        rng: random.Random,
        tell: Callable[[int, int, PairState], None],
        metrics: SendMetrics | None = None,
    ) -> None:
        self._transport = transport
        self._rng = rng
        self._tell = tell
        self._metrics = metrics or SendMetrics()
        self._pairs: dict[int, _Pair] = {}
        # Those that are being parted; the same decode worker may be named again meanwhile.
        self._parting: dict[asyncio.Task[None], int] = {}
        transport.on_changed = self._set

    def __len__(self) -> int:
        return len(self._pairs)

    @property
    def complaint(self) -> str:
        """Why no prompt's KV could go anywhere; empty once one decode worker is reached and all are tried."""
        states = [pair.state for pair in self._pairs.values()]
        if any(state is None for state in states):
            return "it is still pairing with a decode worker"
        if not any(isinstance(state, Pairing) for state in states):
            return "it is paired with no decode worker"
        return ""

    def transport_to(self, incarnation: int) -> str:
        """Name of the transport to a decode worker; "none" while it cannot be reached."""
        pair = self._pairs.get(incarnation)
        return pair.state.transport if pair is not None and isinstance(pair.state, Pairing) else "none"

    def meet(self, session_id: int, peer: Peer) -> None:
        """A router names a decode worker; it hears of the pair's state as soon as there is one."""
        pair = self._pairs.get(peer.incarnation)
        if pair is None:
            task = asyncio.create_task(self._hold(peer), name=f"pair-{peer.worker}")
            task.add_done_callback(partial(self._ended, peer))
            pair = self._pairs[peer.incarnation] = _Pair(peer, task)
        pair.sessions.add(session_id)
        if pair.state is not None:
            self._tell(session_id, peer.incarnation, pair.state)

    def doubt(self, incarnation: int, transport: str, error: PeerLost) -> None:
        """A transfer over that transport found nobody there: the pair is made anew, and not used until then.

        Unless it has gone over to another transport since, because that one failed.
        """
        pair = self._pairs.get(incarnation)
        if pair is not None and self.transport_to(incarnation) == transport != "none":
            self._set(incarnation, error)
            pair.doubted.set()

    def part(self, session_id: int, incarnation: int) -> None:
        """A router's decode worker is gone; once no router names it, it is dropped. Idempotent."""
        pair = self._pairs.get(incarnation)
        if pair is None:
            return
        pair.sessions.discard(session_id)
        if not pair.sessions:
            del self._pairs[incarnation]
            if pair.task.cancel():
                self._parting[pair.task] = incarnation

    def leave(self, session_id: int) -> None:
        """A router's session has ended: it names nobody any more."""
        for incarnation in list(self._pairs):
            self.part(session_id, incarnation)

    def _ended(self, peer: Peer, task: asyncio.Task[None]) -> None:
        was_parting = self._parting.pop(task, None) is not None
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("pair failed", worker=peer.worker, reason=repr(error))
        if not was_parting:
            self._set(peer.incarnation, InternalError(f"pairing with {peer.worker} failed"))

    async def _hold(self, peer: Peer) -> None:
        """Until cancelled."""
        before = [task for task, parting in self._parting.items() if parting == peer.incarnation]
        if before:
            await asyncio.wait(before)
        try:
            while True:
                await self._reach(peer)
                doubted = self._pairs[peer.incarnation].doubted
                await doubted.wait()
                doubted.clear()
                await self._transport.part(peer.incarnation)
        finally:
            await self._transport.part(peer.incarnation)

    async def _reach(self, peer: Peer) -> None:
        pause_s = FIRST_PAUSE_S
        began = asyncio.get_running_loop().time()
        while True:
            try:
                pairing = await self._transport.pair(peer)
            except IncompatiblePeer as error:
                log.warning("pair refused", worker=peer.worker, field=error.field, reason=error.message)
                self._set(peer.incarnation, error)
                return
            except BatonError as error:
                self._set(peer.incarnation, error)
            else:
                log.info("paired", worker=peer.worker, transport=pairing.transport, note=pairing.note)
                self._metrics.paired(pairing.transport, asyncio.get_running_loop().time() - began)
                self._set(peer.incarnation, pairing)
                return
            await asyncio.sleep(self._rng.uniform(0.5, 1) * pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _set(self, incarnation: int, state: PairState) -> None:
        pair = self._pairs.get(incarnation)
        if pair is not None:
            pair.state = state
            for session_id in sorted(pair.sessions):
                self._tell(session_id, incarnation, state)
