"""How long the router takes to decide where an attempt goes, in one process and without a network.

The real inside of a router; the workers are simulated and talk over sessions in memory. Timed is all of
Dispatcher.assign() for an attempt that need not wait: hashing the prompt and looking it up in the prefix
index, joining the queue, leaving it, looking at the workers, choosing, and counting the attempt at those
chosen.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from baton.bench.percentiles import percentile
from baton.identity import Identity
from baton.ports import WorkerInfo
from baton.v1 import common_pb2
from benchmarks.memory_session import MemoryDialer, Serve
from benchmarks.report import Row
from benchmarks.sim_costs import SimSizes
from benchmarks.sim_decode import SimDecode
from benchmarks.sim_prefill import SimPrefill
from router.assignment import Assignment, Wanted
from router.config import RouterConfig
from router.core import RouterCore
from router.placing.prompt_keys import PromptKeys

# 0.2 ms at 64 workers; see benchmarks/README.md.
DECISION_US = 200.0
# Attempts under way per worker of a role, and what they are like.
PER_WORKER = 4
PROMPT_TOKENS, OUTPUT_TOKENS = (16, 2_000), 128
# Their common beginning, which half of the workers have cached.
CACHED_TOKENS = 960
START_S = 60.0
FINGERPRINT = common_pb2.Fingerprint(weights_id="simulated")
# Room for all of them: no worker is ever full.
SIZES = SimSizes(credit_tokens=1 << 20, num_blocks=1 << 16)


@dataclass(slots=True)
class Decisions:
    """Times of decisions, in microseconds."""

    num_workers: int
    times_us: list[float] = field(default_factory=list)

    @property
    def p50_us(self) -> float:
        """Half take no longer."""
        return percentile(self.times_us, 50)

    def rows(self) -> list[Row]:
        """The median, beside its budget, and the 99th percentile."""
        runs = len(self.times_us)
        of = "1 worker" if self.num_workers == 1 else f"{self.num_workers} workers"
        return [
            Row(
                metric=f"decision p50, {of}",
                unit="us",
                ours=self.p50_us,
                runs=runs,
                peer=DECISION_US,
                peer_name="the budget",
                ratio=DECISION_US / self.p50_us,
                target=1.0,
            ),
            Row(metric=f"decision p99, {of}", unit="us", ours=percentile(self.times_us, 99), runs=runs),
        ]


async def decisions(num_workers: int, count: int, **settings: Any) -> Decisions:
    """Decides `count` times among num_workers, half of each role; 1 is one of each.

    settings: of the router, as RouterConfig has them.
    """
    half = max(1, num_workers // 2)
    async with _core(half, RouterConfig(model="simulated", **settings)) as core:
        _learn(core)
        found, chooser = Decisions(num_workers), _Chooser(core)
        for _ in range(PER_WORKER * half):
            await chooser.decide()
        gc.collect()
        for number in range(count):
            chooser.end_oldest()
            found.times_us.append(await chooser.decide())
            if number % 50 == 0:
                # Heartbeats, or the sessions would be lost.
                await asyncio.sleep(0)
        chooser.end_all()
        return found


class _Chooser:
    """Has attempts of mixed lengths placed, and ends the oldest."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core
        self._rng = random.Random(0)
        self._placed: deque[Assignment] = deque()

    async def decide(self) -> float:
        """Places one attempt; returns the microseconds of processor time that took."""
        wanted = self._wanted()
        # The thread's clock: a decision waits for nothing, and others use this machine as well.
        began = time.thread_time()
        self._placed.append(await self._core.dispatcher.assign(wanted))
        return 1e6 * (time.thread_time() - began)

    def end_oldest(self) -> None:
        """The attempt that was placed first leaves its workers."""
        self._placed.popleft().undo()

    def end_all(self) -> None:
        """Nothing is left."""
        while self._placed:
            self.end_oldest()

    def _wanted(self) -> Wanted:
        now, num_tokens = asyncio.get_running_loop().time(), self._rng.randint(*PROMPT_TOKENS)
        in_all = num_tokens + OUTPUT_TOKENS
        return Wanted(
            attempt_id=self._rng.randbytes(16),
            num_tokens=num_tokens,
            kv_tokens=in_all,
            expected_tokens=in_all,
            keys=PromptKeys(list(range(num_tokens)), b""),
            arrived_at=now,
            due_at=now + 0.5 + 0.003 * num_tokens,
        )


def _learn(core: RouterCore) -> None:
    """Every worker was seen at work."""
    costs = core.outlook.costs
    for _ in range(20):
        for prefill in core.fleet.prefill_links():
            for num_tokens in (64, 256, 1_024):
                costs.observe_prefill(prefill.incarnation, num_tokens, 0, 2.0 + 0.5 * num_tokens)
        for decode in core.fleet.decode_links():
            for num_decoding in (1, 8, 32):
                context = 500 * num_decoding
                costs.observe_step(decode.incarnation, num_decoding, context, 0, 10.0 + num_decoding)
    _hold(core)


def _hold(core: RouterCore) -> None:
    """Every other worker has the first CACHED_TOKENS that all prompts share."""
    for link in core.fleet.links[::2]:
        keys = PromptKeys(range(CACHED_TOKENS)).all(link.block_size)
        changes = common_pb2.CacheChanges(reset=True, stored=b"".join(keys))
        core.outlook.prefixes.apply(
            link.incarnation, changes, block_size=link.block_size, max_keys=link.num_blocks
        )


class _FixedRegistry:
    """A registry in which nobody comes or goes."""

    def __init__(self, infos: Sequence[WorkerInfo]) -> None:
        self._infos = tuple(infos)

    async def register(self, info: WorkerInfo, ttl_s: float) -> None:
        """Does nothing."""

    async def deregister(self, info: WorkerInfo) -> None:
        """Does nothing."""

    async def watch(self) -> AsyncIterator[Sequence[WorkerInfo]]:
        """All of them, once."""
        yield self._infos
        await asyncio.Event().wait()


@asynccontextmanager
async def _core(half: int, config: RouterConfig) -> AsyncIterator[RouterCore]:
    """A router's inside with as many simulated workers of each role, all of which reach each other."""
    rng, serves, infos = random.Random(2), dict[str, Serve](), list[WorkerInfo]()
    by_incarnation: dict[int, SimDecode] = {}
    for index in range(half):
        identity = Identity.draw(f"decode-{index}", common_pb2.ROLE_DECODE, FINGERPRINT, rng)
        decode = by_incarnation[identity.incarnation] = SimDecode(identity, sizes=SIZES, rng=rng)
        serves[identity.name] = decode.serve
        infos.append(_info(identity, "decode"))
    for index in range(half):
        identity = Identity.draw(f"prefill-{index}", common_pb2.ROLE_PREFILL, FINGERPRINT, rng)
        serves[identity.name] = SimPrefill(identity, by_incarnation, sizes=SIZES).serve
        infos.append(_info(identity, "prefill"))
    dialer: Any = MemoryDialer(serves)
    core = RouterCore.assemble(
        config,
        identity=Identity.draw("router", common_pb2.ROLE_ROUTER, FINGERPRINT, rng),
        registry=_FixedRegistry(infos),
        prefill_dialer=dialer,
        decode_dialer=dialer,
        rng=rng,
    )
    following = asyncio.create_task(core.fleet.run(), name="fleet")
    try:
        await _until_paired(core, half)
        yield core
    finally:
        following.cancel()
        await asyncio.wait([following])
        core.close()


async def _until_paired(core: RouterCore, half: int) -> None:
    async with asyncio.timeout(START_S):
        # Nothing tells of it; a turn of the loop is cheap, and there are few.
        while not _is_paired(core, half):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def _is_paired(core: RouterCore, half: int) -> bool:
    prefills, decodes = core.fleet.prefill_links(), core.fleet.decode_links()
    return (
        len(prefills) == len(decodes) == half
        and all(prefill.credit for prefill in prefills)
        and not core.fleet.is_pairing
    )


def _info(identity: Identity, role: str) -> WorkerInfo:
    return WorkerInfo(name=identity.name, role=role, incarnation=identity.incarnation, address="memory:1")
