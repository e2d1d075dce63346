"""Measurements of kernels as a table to read."""

from __future__ import annotations

from collections.abc import Iterator

from engine.kernels.kernel import Shape
from engine.kernels.measurements import Ladder, Measurements, Race


def table(measurements: Measurements) -> str:
    """Lines of text: every kernel and shape with its configurations, then every crossing."""
    lines = [line for race in measurements.races.values() for line in _race_lines(race)]
    lines += [line for ladder in measurements.ladders.values() for line in _ladder_lines(ladder)]
    return "\n".join(lines)


def _race_lines(race: Race) -> Iterator[str]:
    dropped = race.num_declared - len(race.times)
    counted = f"{race.num_declared} declared" + (f", {dropped} dropped" if dropped else "")
    yield f"{race.kernel}  {_shape(race.shape)}  ({counted})"
    for config, seconds in race.times:
        mark = "*" if config == race.winner else " "
        yield f"  {mark} {_microseconds(seconds)}  {config}"


def _ladder_lines(ladder: Ladder) -> Iterator[str]:
    said = "the vendor's operators are used" if ladder.crossing is None else _from(ladder.crossing)
    yield f"{ladder.op}  {_shape(ladder.shape)}  ({said})"
    for rung in ladder.rungs:
        mark = "*" if ladder.crossing is not None and rung.num_tokens >= ladder.crossing else " "
        yield (
            f"  {mark} {rung.num_tokens:>5} tokens  kernel {_microseconds(rung.kernel_s)}"
            f"  vendor {_microseconds(rung.vendor_s)}"
        )


def _from(crossing: int) -> str:
    return f"the kernel is used from {crossing} token{'s' if crossing > 1 else ''} on"


def _shape(shape: Shape) -> str:
    return " ".join(f"{name}={value}" for name, value in shape)


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:10.1f} us"
