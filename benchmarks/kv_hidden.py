"""How much of a prompt's KV is at the receiver before prefill has ended, and what sending costs prefill.

Owns the cases, the rounds and the rows. In every round each case runs once without a transfer and once
with every transport. NIXL comes last, and its agents live no longer than its turn: see
benchmarks/kv_throughput.py.
"""

from __future__ import annotations

import gc
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.kv_prefill import BLOCK_SIZE, Prefill, PrefillSide
from benchmarks.kv_rig import ReceiverProcess, SendingSide
from benchmarks.report import Row

# What is connected at the same time.
TRANSPORTS = (("grpc", "shm"), ("nixl",))
ALONE = "alone"
HIDDEN_TARGET = 0.90
SLOW_DOWN_TARGET = 1.05
# (prompt tokens, tokens of a chunk)
Case = tuple[int, int]
CASES: tuple[Case, ...] = (
    (1024, 128),
    (1024, 256),
    (1024, 512),
    (1024, 1024),
    (2048, 128),
    (2048, 256),
    (2048, 512),
    (2048, 1024),
    (2048, 2048),
)
QUICK_CASES: tuple[Case, ...] = ((512, 128), (512, 512))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """One case with one transport: the runs, and those without a transfer beside them."""

    transport: str
    num_tokens: int
    chunk_tokens: int
    runs: Sequence[Prefill]
    alone: Sequence[Prefill]

    @property
    def name(self) -> str:
        """Of its rows."""
        pieces = (
            "in one piece" if self.chunk_tokens >= self.num_tokens else f"in chunks of {self.chunk_tokens}"
        )
        return f"{self.transport}, {self.num_tokens} {pieces}"

    @property
    def share(self) -> float | None:
        """Of all bytes, what was stored at the receiver when the last layer ended; median."""
        shares = [run.hidden_share for run in self.runs if run.hidden_share is not None]
        return median(shares) if shares else None

    def rows(self) -> list[Row]:
        """Hidden share, prefill beside prefill alone, and the wait that is left behind the token."""
        share = self.share
        target = HIDDEN_TARGET if self.chunk_tokens < self.num_tokens else None
        tails = [run.tail_s for run in self.runs if run.tail_s is not None]
        count = len(self.runs)
        return [
            Row(
                metric=f"hidden, {self.name}",
                unit="share",
                ours=share,
                runs=count,
                peer=1.0,
                peer_name="all bytes",
                ratio=share,
                target=target,
            ),
            self._prefill_row(),
            Row(
                metric=f"tail, {self.name}",
                unit="ms",
                ours=1000 * median(tails) if tails else None,
                runs=count,
            ),
        ]

    def _prefill_row(self) -> Row:
        alone_s = median(run.prefill_s for run in self.alone)
        ours_s = median(run.prefill_s for run in self.runs) if self.runs else None
        return Row(
            metric=f"prefill, {self.name}",
            unit="ms",
            ours=None if ours_s is None else 1000 * ours_s,
            runs=len(self.runs),
            peer=1000 * alone_s,
            peer_name="prefill alone",
            ratio=None if ours_s is None else alone_s / ours_s,
            target=round(1 / SLOW_DOWN_TARGET, 3),
        )


async def measure(cases: Sequence[Case], num_rounds: int) -> list[Hidden]:
    """num_rounds rounds of every case."""
    max_tokens = max(num_tokens for num_tokens, _ in cases)
    runs: dict[tuple[str, Case], list[Prefill]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        prefills = await PrefillSide.start(max_tokens, Path(folder))
        try:
            await prefills.run(max_tokens, max_tokens)
            for number in range(num_rounds):
                print(f"measuring prefill: round {number + 1} of {num_rounds}", flush=True)
                for transports in TRANSPORTS:
                    await _round(prefills, transports, cases, runs)
        finally:
            await prefills.close()
    return [
        Hidden(
            transport=name,
            num_tokens=case[0],
            chunk_tokens=case[1],
            runs=runs[name, case],
            alone=runs[ALONE, case],
        )
        for transports in TRANSPORTS
        for name in transports
        for case in cases
    ]


async def _round(
    prefills: PrefillSide,
    transports: Sequence[str],
    cases: Sequence[Case],
    runs: dict[tuple[str, Case], list[Prefill]],
) -> None:
    async with _paired(prefills, transports) as sides:
        for case in cases:
            if transports is TRANSPORTS[0]:
                runs[ALONE, case].append(await prefills.run(*case))
            for name, side in sides.items():
                runs[name, case].append(await prefills.run(*case, side))
    # What a closed agent leaves to the garbage collector is a thread that spins.
    gc.collect()


@asynccontextmanager
async def _paired(prefills: PrefillSide, transports: Sequence[str]) -> AsyncIterator[dict[str, SendingSide]]:
    """A receiver and, by the transport's name, a sender for each that can be used here; warm."""
    async with AsyncExitStack() as stack:
        receiver = ReceiverProcess(prefills.cache.shape)
        stack.callback(receiver.close)
        paired = {}
        for name in transports:
            side = SendingSide(prefills.cache, receiver, name)
            stack.push_async_callback(side.close)
            try:
                await side.pair()
            except RuntimeError as error:
                print(error)
                continue
            await side.send(BLOCK_SIZE)
            paired[name] = side
        yield paired
