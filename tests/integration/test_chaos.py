"""Real processes under load while workers and routers are killed, stopped and cut off: nothing is lost.

Three series of faults run at once, one per role, each in an order drawn from the seed. A series waits until
the cluster is whole again for its role before its next fault, so there is always another of each role.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
from transformers import LlamaForCausalLM

from baton import AsyncClient
from baton.errors import BatonError
from tests.integration.oracle import assert_greedy
from tests.integration.process_cluster import DECODE, PREFILL, ROUTERS, ProcessCluster, process_cluster
from tests.tcp_proxy import BOTH

SEEDS = (3, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 4, 5)))
NUM_CLIENTS = 6
# SIGSTOP: noticed by nobody, longer than the silence that ends a session, longer than a lease.
PAUSES_S = (0.5, 3.0, 12.0)
CUT_S = 1.5
HOLE_S = 4.0
BUSY_WITHIN_S = 10.0
WHOLE_WITHIN_S = 30.0
SETTLED_WITHIN_S = 5.0

Strike = Callable[[], Awaitable[None]]
Case = tuple[tuple[int, ...], int]


def mixed_cases() -> list[Case]:
    """Prompts from one token to many chunks, with answers from short to several seconds long."""
    rng = random.Random(1)
    sizes = [(n, m) for n in (1, 16, 90, 300, 700, 1400) for m in (8, 60, 400)]
    return [(tuple(rng.randrange(3, 259) for _ in range(n)), m) for n, m in sizes]


@dataclass
class Load:
    """Clients that ask one question after the other until stopped; keeps every answer and every error.

    addresses: of all routers; each question begins at one drawn for it, so that all of them have work.
    """

    addresses: Sequence[str]
    seed: int
    answers: list[tuple[Case, list[int]]] = field(default_factory=list)
    failures: list[tuple[float, BatonError]] = field(default_factory=list)
    num_resumed: int = 0
    longest_s: float = 0.0
    is_stopped: bool = False

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for index in range(NUM_CLIENTS):
                group.create_task(self._ask_on(random.Random(self.seed * NUM_CLIENTS + index)))

    async def progress(self) -> None:
        """Waits until as many answers as there are clients have ended from now."""
        due = len(self.answers) + NUM_CLIENTS
        async with asyncio.timeout(WHOLE_WITHIN_S):
            while len(self.answers) < due:
                await asyncio.sleep(0.02)

    async def _ask_on(self, rng: random.Random) -> None:
        loop = asyncio.get_running_loop()
        cases = mixed_cases()
        while not self.is_stopped:
            case, asked_at = rng.choice(cases), loop.time()
            try:
                targets = rng.sample(self.addresses, len(self.addresses))
                async with await AsyncClient.connect(targets) as client:
                    tokens, num_attempts = await answer(client, case)
                self.answers.append((case, tokens))
                self.num_resumed += num_attempts > 1
            except BatonError as error:
                self.failures.append((loop.time(), error))
            self.longest_s = max(self.longest_s, loop.time() - asked_at)


async def answer(client: AsyncClient, case: Case) -> tuple[list[int], int]:
    """The tokens of one greedy answer, and the attempts that its last router made.

    Their indices must have no gap and no repetition.
    """
    prompt, max_tokens = case
    generation = client.generate(
        token_ids=prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True, timeout_s=60
    )
    tokens: list[int] = []
    async for chunk in generation:
        assert chunk.start_index == len(tokens)
        tokens += chunk.token_ids
    assert generation.summary.num_output_tokens == len(tokens) == max_tokens
    return tokens, generation.summary.timings.num_attempts


class Faults:
    """The faults, each proven to strike work in flight, and lifted before it returns."""

    def __init__(self, cluster: ProcessCluster, load: Load) -> None:
        self._cluster = cluster
        self._load = load
        self.struck: list[str] = []

    async def kill(self, name: str) -> None:
        await self._until_busy(name)
        self._strikes(f"kill {name}")
        await self._cluster.kill(name)

    async def pause(self, name: str, seconds: float) -> None:
        await self._until_busy(name)
        self._strikes(f"stop {name} {seconds} s")
        self._cluster.signal(name, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._cluster.signal(name, signal.SIGCONT)

    async def cut(self, peers: Sequence[str], worker: str) -> None:
        """Cuts the link between the worker and one of the peers, one that is busy."""
        peer = await self._busy_peer(peers, worker)
        self._strikes(f"cut {peer} from {worker}")
        proxy = self._cluster.proxies[worker]
        proxy.cut(peer)
        await asyncio.sleep(CUT_S)
        assert not proxy.of(peer)
        proxy.heal(peer)

    async def hole(self, peers: Sequence[str], worker: str) -> None:
        peer = await self._busy_peer(peers, worker)
        self._strikes(f"black hole {peer} to {worker}")
        proxy = self._cluster.proxies[worker]
        assert proxy.of(peer)
        proxy.timeout(peer, BOTH)
        await asyncio.sleep(HOLE_S)
        proxy.heal(peer)

    async def recover(self, role: Sequence[str]) -> None:
        """Waits until the role is whole again and answers have come since.

        What the other roles lack meanwhile is their own series' business.
        """
        if role is ROUTERS:
            await self._cluster.wait_able(WHOLE_WITHIN_S)
        else:
            await self._cluster.wait_ready(role, WHOLE_WITHIN_S)
        await self._load.progress()

    def _strikes(self, what: str) -> None:
        self.struck.append(what)
        print(f"{asyncio.get_running_loop().time():.2f} {what}")

    async def _until_busy(self, name: str) -> None:
        async with asyncio.timeout(BUSY_WITHIN_S):
            while not await self._is_busy(name):
                await asyncio.sleep(0.005)

    async def _is_busy(self, name: str) -> bool:
        if name in ROUTERS:
            return await self._cluster.num_requests(name) > 0
        return any([await self._cluster.num_attempts(router, name) > 0 for router in ROUTERS])

    async def _busy_peer(self, peers: Sequence[str], worker: str) -> str:
        """The first of the peers that is seen to use its link: bytes of attempts or of KV move."""
        before = {peer: self._num_kv_bytes(peer, worker) for peer in peers}
        async with asyncio.timeout(BUSY_WITHIN_S):
            while True:
                for peer in peers:
                    if peer in ROUTERS and await self._cluster.num_attempts(peer, worker) > 0:
                        return peer
                    if peer in PREFILL and self._num_kv_bytes(peer, worker) > before[peer]:
                        return peer
                await asyncio.sleep(0.005)

    def _num_kv_bytes(self, peer: str, worker: str) -> int:
        return sum(connection.num_bytes["up"] for connection in self._cluster.proxies[worker].of(peer))


def series(faults: Faults, rng: random.Random) -> dict[Sequence[str], list[Strike]]:
    """The faults of each role in the order drawn for it; victims are drawn too."""

    def of_workers(names: Sequence[str]) -> list[Strike]:
        victims = [rng.choice(names) for _ in range(6)]
        return [
            lambda: faults.kill(victims[0]),
            *(lambda n=n, s=s: faults.pause(n, s) for n, s in zip(victims[1:4], PAUSES_S, strict=True)),
            lambda: faults.cut(ROUTERS, victims[4]),
            lambda: faults.hole(ROUTERS, victims[5]),
        ]

    prefill, decode = of_workers(PREFILL), of_workers(DECODE)
    receivers = [rng.choice(DECODE) for _ in range(2)]
    decode += [lambda: faults.cut(PREFILL, receivers[0]), lambda: faults.hole(PREFILL, receivers[1])]
    routers = [lambda name=name: faults.kill(name) for name in rng.sample(ROUTERS, len(ROUTERS))]
    for drawn in (prefill, decode):
        rng.shuffle(drawn)
    return {PREFILL: prefill, DECODE: decode, ROUTERS: routers}


@pytest_asyncio.fixture
async def cluster(tiny_model: tuple[Path, LlamaForCausalLM], tmp_path: Path) -> AsyncIterator[ProcessCluster]:
    async with process_cluster(tiny_model[0], tmp_path) as started:
        yield started


@pytest.mark.parametrize("seed", SEEDS)
async def test_every_answer_is_complete_whatever_dies(
    cluster: ProcessCluster, tiny_model: tuple[Path, LlamaForCausalLM], seed: int
) -> None:
    load = Load(cluster.addresses, seed)
    faults = Faults(cluster, load)
    drawn = series(faults, random.Random(seed))

    async def run(role: Sequence[str], strikes: Sequence[Strike]) -> None:
        for strike in strikes:
            await strike()
            await faults.recover(role)

    async with asyncio.TaskGroup() as group:
        group.create_task(load.run())
        await load.progress()
        async with asyncio.TaskGroup() as storm:
            for role, strikes in drawn.items():
                storm.create_task(run(role, strikes))
        load.is_stopped = True
    print(f"{len(load.answers)} answers, {load.num_resumed} of them resumed, at most {load.longest_s:.1f} s")

    assert len(faults.struck) == sum(map(len, drawn.values())) == 16
    assert [(at, error.code, error.message) for at, error in load.failures] == []
    assert load.num_resumed > 0
    # Each router and each worker takes work again.
    for address in cluster.addresses:
        async with await AsyncClient.connect(address) as client:
            load.answers += [(case, (await answer(client, case))[0]) for case in mixed_cases()[:4]]
    await assert_nothing_is_held(cluster)
    assert_exact(tiny_model[1], load.answers)


async def assert_nothing_is_held(cluster: ProcessCluster) -> None:
    deadline = asyncio.get_running_loop().time() + SETTLED_WITHIN_S
    while True:
        held = {
            name: {what: count for what, count in counts.items() if count}
            for name, counts in (await cluster.ledgers()).items()
        }
        if not any(held.values()) or asyncio.get_running_loop().time() > deadline:
            break
        await asyncio.sleep(0.02)
    assert not any(held.values()), held


def assert_exact(model: LlamaForCausalLM, answers: Sequence[tuple[Case, list[int]]]) -> None:
    """Every answer is transformers' own; equal answers are compared once."""
    for (prompt, max_tokens), tokens in {(case, tuple(tokens)) for case, tokens in answers}:
        assert len(tokens) == max_tokens
        assert_greedy(model, list(prompt), tokens)
