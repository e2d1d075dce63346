"""What was measured of kernels on one device, and which choices follow from it; as data and as JSON.

Knows neither devices nor files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engine.kernels.choices import Choices
from engine.kernels.kernel import Config, Shape

# Name of a kernel or an operator, and its shape.
Key = tuple[str, Shape]


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """One shape of a kernel, run in all of its configurations.

    num_declared: configurations.  times: seconds of those that ran, in the order of their declaration.
    """

    kernel: str
    shape: Shape
    num_declared: int
    times: tuple[tuple[Config, float], ...]

    @property
    def winner(self) -> Config:
        """The fastest; of equals the one declared first."""
        return min(self.times, key=lambda time: time[1])[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """Seconds of a kernel, and of the vendor's operators in its place, for a number of tokens."""

    num_tokens: int
    kernel_s: float
    vendor_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """One shape of an operator over rising numbers of tokens."""

    op: str
    shape: Shape
    rungs: tuple[Rung, ...]

    @property
    def crossing(self) -> int | None:
        """The first rung from which the kernel is never slower; None if it is slower on the last."""
        crossing = None
        for rung in reversed(self.rungs):
            if rung.kernel_s > rung.vendor_s:
                break
            crossing = rung.num_tokens
        return crossing


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Everything known about one device; of several models, where it served them."""

    races: Mapping[Key, Race] = field(default_factory=dict)
    ladders: Mapping[Key, Ladder] = field(default_factory=dict)

    def with_race(self, race: Race) -> Measurements:
        """These and one more."""
        return replace(self, races={**self.races, (race.kernel, race.shape): race})

    def with_ladder(self, ladder: Ladder) -> Measurements:
        """These and one more."""
        return replace(self, ladders={**self.ladders, (ladder.op, ladder.shape): ladder})

    def choices(self, crossings: Iterable[Key] = ()) -> Choices:
        """crossings: the operators' shapes that a model has, all of them measured."""
        return Choices(
            measured={key: race.winner for key, race in self.races.items()},
            crossings={key[0]: self.ladders[key].crossing for key in crossings},
        )

    def to_json(self) -> dict[str, Any]:
        """Read back by from_json()."""
        return {
            "kernels": [_race_json(race) for race in self.races.values()],
            "crossings": [_ladder_json(ladder) for ladder in self.ladders.values()],
        }

    @classmethod
    def from_json(cls, content: Any) -> Measurements:
        """Raises ValueError for anything that to_json() does not write."""
        try:
            races = [_race(entry) for entry in content["kernels"]]
            ladders = [_ladder(entry) for entry in content["crossings"]]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a table of measurements: {error!r}") from error
        return cls(
            races={(race.kernel, race.shape): race for race in races},
            ladders={(ladder.op, ladder.shape): ladder for ladder in ladders},
        )


def _race_json(race: Race) -> dict[str, Any]:
    return {
        "kernel": race.kernel,
        "shape": dict(race.shape),
        "declared": race.num_declared,
        "chosen": str(race.winner),
        "times": [
            {
                "constants": dict(config.constants),
                "num_warps": config.num_warps,
                "num_stages": config.num_stages,
                "seconds": seconds,
            }
            for config, seconds in race.times
        ],
    }


def _race(entry: Mapping[str, Any]) -> Race:
    times = tuple((_config(time), _seconds(time["seconds"])) for time in entry["times"])
    if not times:
        raise ValueError(f"no configuration of {entry['kernel']} was measured")
    return Race(
        kernel=_name(entry["kernel"]),
        shape=_shape(entry["shape"]),
        num_declared=_count(entry["declared"]),
        times=times,
    )


def _ladder_json(ladder: Ladder) -> dict[str, Any]:
    return {
        "op": ladder.op,
        "shape": dict(ladder.shape),
        "kernel_from_tokens": ladder.crossing,
        "rungs": [
            {"tokens": rung.num_tokens, "kernel_s": rung.kernel_s, "vendor_s": rung.vendor_s}
            for rung in ladder.rungs
        ],
    }


def _ladder(entry: Mapping[str, Any]) -> Ladder:
    rungs = tuple(
        Rung(
            num_tokens=_count(rung["tokens"]),
            kernel_s=_seconds(rung["kernel_s"]),
            vendor_s=_seconds(rung["vendor_s"]),
        )
        for rung in entry["rungs"]
    )
    return Ladder(op=_name(entry["op"]), shape=_shape(entry["shape"]), rungs=rungs)


def _config(entry: Mapping[str, Any]) -> Config:
    return Config(
        constants={_name(name): _count(value) for name, value in entry["constants"].items()},
        num_warps=_count(entry["num_warps"]),
        num_stages=_count(entry["num_stages"]),
    )


def _shape(entry: Mapping[str, Any]) -> Shape:
    for value in entry.values():
        if not isinstance(value, int | str):
            raise TypeError(f"{value!r} in a shape")
    return tuple(entry.items())


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} where a name belongs")
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} where a whole number belongs")
    return value


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} where seconds belong")
    return float(value)
