"""Memory, descriptors and threads of processes over time, looked at from outside.

Knows processes by the names that its caller gives. It keeps every sample and interprets none but slopes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import psutil

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at one process: seconds on the loop's clock, and what it holds."""

    at: float
    pid: int
    rss_mib: float
    num_fds: int
    num_threads: int


@dataclass
class ProcessWatch:
    """Samples every so many seconds inside `async with`, which raises what find raised.

    find: process ids by name, asked anew each time.
    """

    find: Callable[[], Awaitable[Mapping[str, int]]]
    every_s: float
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    _sampler: asyncio.Task[None] | None = None

    def peak_rss_mib(self) -> dict[str, float]:
        """The most that each name's processes have held, in MiB."""
        return {name: max(s.rss_mib for s in samples) for name, samples in sorted(self.samples.items())}

    async def look(self) -> None:
        """Samples now."""
        pids = await self.find()
        now = asyncio.get_running_loop().time()
        for name, pid in pids.items():
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                with process.oneshot():
                    rss_mib = process.memory_info().rss / _MIB
                    sample = Sample(now, pid, rss_mib, process.num_fds(), process.num_threads())
                self.samples.setdefault(name, []).append(sample)

    async def __aenter__(self) -> Self:
        self._sampler = asyncio.create_task(self._look_on(), name="process watch")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._sampler is not None
        self._sampler.cancel()
        await asyncio.wait([self._sampler])
        if not self._sampler.cancelled():
            self._sampler.result()
        await self.look()

    async def _look_on(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self.every_s)


def changes(watches: Iterable[ProcessWatch]) -> dict[str, str]:
    """What happened to names that have not been one and the same process from the first look to the last."""
    whole: dict[str, list[Sample]] = {}
    for watch in watches:
        for name, samples in watch.samples.items():
            whole.setdefault(name, []).extend(samples)
    looks = [sample.at for samples in whole.values() for sample in samples]
    found = {}
    for name, samples in sorted(whole.items()):
        pids = list(dict.fromkeys(sample.pid for sample in sorted(samples, key=lambda sample: sample.at)))
        times = {sample.at for sample in samples}
        if len(pids) > 1:
            found[name] = f"{name} has been processes {pids}"
        elif not {min(looks), max(looks)} <= times:
            found[name] = f"{name} was not there at the first or the last look"
    return found


def slope_per_min(samples: Sequence[Sample]) -> float:
    """Growth of resident memory in MiB per minute, by least squares through at least two samples."""
    mean_at = sum(s.at for s in samples) / len(samples)
    mean_rss = sum(s.rss_mib for s in samples) / len(samples)
    spread = sum((s.at - mean_at) ** 2 for s in samples)
    return 60 * sum((s.at - mean_at) * (s.rss_mib - mean_rss) for s in samples) / spread
