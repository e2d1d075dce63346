"""How fast KV goes from one process to another, per transport, beside what the machine can do without Baton.

Owns the lanes, the rounds and the rows. A group is one pair of cache shapes: its lanes and their bare
peers take turns in every round, so that a slow moment of the machine meets all of them. NIXL's lanes have
rounds of their own behind the others': a thread of each of its agents spins for as long as the agent lives,
and would take a core from whatever else is measured.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from statistics import median

import torch

from benchmarks.bare_nixl import NixlWrite
from benchmarks.bare_peers import MIB, TOTAL_BYTES, GrpcStream, MemoryCopy, TcpConnection, gb_per_s
from benchmarks.kv_rig import ReceiverProcess, SendingSide, random_cache
from benchmarks.report import Row
from engine.kv_cache import CacheShape, KVCache
from kvtransfer.sender import TransferOutcome

LENGTHS = (64, 512, 2048, 8192)
CONVERTED_LENGTHS = (2048,)
BLOCK_SIZES = (16, 64, 128)
# Below it the fixed cost of a transfer, a few messages there and back, is what is measured.
MIN_TARGET_TOKENS = 2048

MEMCPY, TCP = "memcpy", "bare loopback TCP"
GRPC, GRPC_TOUCHED = "bare gRPC stream", "bare gRPC stream, both ends copy"
NIXL, NIXL_WHOLE = "bare NIXL write, 1 MiB", "bare NIXL write, in one piece"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A transport, the peer it is compared with, and the ratio to reach."""

    name: str
    transport: str
    peer: str
    target: float
    has_digests: bool = True


_LANES = (
    Lane(name="grpc", transport="grpc", peer=GRPC, target=0.85),
    Lane(name="shm", transport="shm", peer=MEMCPY, target=0.45),
    Lane(name="shm, no digests", transport="shm", peer=MEMCPY, target=0.65, has_digests=False),
    Lane(name="nixl", transport="nixl", peer=NIXL, target=0.80),
    Lane(name="nixl, no digests", transport="nixl", peer=NIXL, target=0.80, has_digests=False),
)
# What has rounds of its own.
LANES = (_LANES[:3], _LANES[3:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Everything that is measured between two shapes of cache."""

    name: str
    sender: CacheShape
    receiver: CacheShape
    lengths: tuple[int, ...]
    has_targets: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """What one lane reached with prompts of one length. outcomes: none where the transport is missing."""

    group: Group
    lane: Lane
    num_tokens: int
    outcomes: Sequence[TransferOutcome]
    peer_gb_s: float | None

    @property
    def name(self) -> str:
        """Of its row."""
        return f"{self.lane.name}, {self.group.name}, {self.num_tokens} tokens"

    @property
    def median_run(self) -> TransferOutcome:
        """The run of median duration."""
        by_duration = sorted(self.outcomes, key=lambda outcome: outcome.duration_s)
        return by_duration[len(by_duration) // 2]

    @property
    def gb_s(self) -> float | None:
        """10^9 bytes a second from the first frame to the answer to the commit."""
        if not self.outcomes:
            return None
        return gb_per_s(self.median_run.num_bytes, self.median_run.duration_s)

    def row(self) -> Row:
        """Its line in the report."""
        has_target = self.group.has_targets and self.num_tokens >= MIN_TARGET_TOKENS
        peer, ours = self.peer_gb_s, self.gb_s
        return Row(
            metric=self.name,
            unit="GB/s",
            ours=ours,
            runs=len(self.outcomes),
            peer=peer,
            peer_name=self.lane.peer,
            ratio=ours / peer if ours is not None and peer is not None else None,
            target=self.lane.target if has_target else None,
        )

    def parts_ms(self) -> dict[str, float]:
        """Where the time of the median run went, in milliseconds; the parts overlap."""
        parts = {"duration_ms": round(1000 * self.median_run.duration_s, 2)}
        for name, seconds in asdict(self.median_run.times).items():
            parts[f"{name.removesuffix('_s')}_ms"] = round(1000 * seconds, 2)
        return parts


class BarePeers:
    """All peers that can be had here, by name. samples: GB/s of every measurement; close() it."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = defaultdict(list)
        memory, self._tcp, self._grpc = MemoryCopy(), TcpConnection(), GrpcStream()
        self._measures: dict[str, Callable[[], Awaitable[float]]] = {
            MEMCPY: memory.measure,
            TCP: self._tcp.measure,
            GRPC: lambda: self._grpc.measure(touches=False),
            GRPC_TOUCHED: lambda: self._grpc.measure(touches=True),
        }
        self._nixl: NixlWrite | None = None
        try:
            nixl = self._nixl = NixlWrite()
        except ImportError:
            return
        self._measures[NIXL] = lambda: nixl.measure(MIB)
        self._measures[NIXL_WHOLE] = lambda: nixl.measure(TOTAL_BYTES)

    async def measure(self) -> dict[str, float]:
        """GB/s of each, one after another."""
        measured = {name: await measure() for name, measure in self._measures.items()}
        for name, gb_s in measured.items():
            self.samples[name].append(gb_s)
        return measured

    def rows(self) -> list[Row]:
        """Their own lines, over the whole run."""
        names = (MEMCPY, TCP, GRPC, GRPC_TOUCHED, NIXL, NIXL_WHOLE)
        return [
            Row(
                metric=name,
                unit="GB/s",
                ours=median(self.samples[name]) if self.samples[name] else None,
                runs=len(self.samples[name]),
            )
            for name in names
        ]

    async def close(self) -> None:
        """Ends their processes."""
        self._tcp.close()
        await self._grpc.close()
        if self._nixl is not None:
            self._nixl.close()


def shape_of(block_size: int, num_tokens: int) -> CacheShape:
    """A cache of SmolLM2-135M for that many tokens."""
    return CacheShape(
        num_blocks=num_tokens // block_size,
        num_layers=30,
        num_kv_heads=3,
        block_size=block_size,
        head_dim=64,
        dtype=torch.bfloat16,
    )


def groups(block_sizes: Sequence[int] = BLOCK_SIZES, lengths: tuple[int, ...] = LENGTHS) -> list[Group]:
    """Everything that is measured, in order."""
    blocks = {f"block {size}": shape_of(size, max(lengths)) for size in block_sizes}
    base = {size: shape_of(size, max(CONVERTED_LENGTHS)) for size in (16, 32, 64)}
    conversions = {
        "block 16 -> 32": (base[16], base[32]),
        "block 32 -> 16": (base[32], base[16]),
        "bf16 -> fp16": (base[64], replace(base[64], dtype=torch.float16)),
        "NHD -> HND": (replace(base[64], layout="NHD"), base[64]),
    }
    return [
        Group(name=name, sender=shape, receiver=shape, lengths=lengths) for name, shape in blocks.items()
    ] + [
        Group(name=name, sender=sender, receiver=receiver, lengths=CONVERTED_LENGTHS, has_targets=False)
        for name, (sender, receiver) in conversions.items()
    ]


async def measure(group: Group, peers: BarePeers, num_rounds: int) -> list[Throughput]:
    """num_rounds rounds, after one that does not count."""
    cache = random_cache(group.sender)
    outcomes: dict[tuple[str, int], list[TransferOutcome]] = {}
    bare: dict[str, list[float]] = defaultdict(list)
    for lanes in LANES:
        async with AsyncExitStack() as stack:
            sides = await _sides(group, lanes, cache, stack)
            for number in range(num_rounds + 1):
                measured = await peers.measure() if lanes is LANES[0] else {}
                sent = await _sends(group, sides)
                if number:
                    for name, gb_s in measured.items():
                        bare[name].append(gb_s)
                    for key, outcome in sent.items():
                        outcomes.setdefault(key, []).append(outcome)
        # What a closed agent leaves to the garbage collector is a thread that spins.
        gc.collect()
    return [
        Throughput(
            group=group,
            lane=lane,
            num_tokens=num_tokens,
            outcomes=outcomes.get((lane.name, num_tokens), []),
            peer_gb_s=median(bare[lane.peer]) if bare[lane.peer] else None,
        )
        for lanes in LANES
        for lane in lanes
        for num_tokens in group.lengths
    ]


async def _sends(group: Group, sides: Mapping[str, SendingSide]) -> dict[tuple[str, int], TransferOutcome]:
    """One transfer of every length in every lane."""
    return {
        (name, num_tokens): await side.send(num_tokens)
        for num_tokens in group.lengths
        for name, side in sides.items()
    }


async def _sides(
    group: Group, lanes: Sequence[Lane], cache: KVCache, stack: AsyncExitStack
) -> dict[str, SendingSide]:
    """A paired sender for every lane whose transport can be used here."""
    receivers: dict[bool, ReceiverProcess] = {}
    sides: dict[str, SendingSide] = {}
    for lane in lanes:
        if lane.has_digests not in receivers:
            receiver = ReceiverProcess(group.receiver, has_digests=lane.has_digests)
            receivers[lane.has_digests] = receiver
            stack.callback(receiver.close)
        side = SendingSide(cache, receivers[lane.has_digests], lane.transport, has_digests=lane.has_digests)
        stack.push_async_callback(side.close)
        try:
            await side.pair()
        except RuntimeError as error:
            print(error)
        else:
            sides[lane.name] = side
    return sides
