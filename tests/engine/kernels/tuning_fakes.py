"""Timers, kernels and contests that do and say what a test of the tuner tells them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from engine.kernels.add_rms_norm import KERNEL, add_rms_norm_launch
from engine.kernels.choices import Choices
from engine.kernels.environment import Environment
from engine.kernels.kernel import Config, Kernel, Launch
from engine.kernels.measurement_store import MeasurementStore
from engine.kernels.tuning import Contest

HERE = Environment(
    device="A Device (80 GB)", driver="1.2", torch_version="2.0", triton_version="3.0", sources="abc"
)
NARROW, MIDDLE, WIDE = KERNEL.configs


class FakeTimer:
    """Runs each call three times, as a timer may, and says what it was told to say."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)

    def __call__(self, run: Callable[[], object]) -> float:
        for _ in range(3):
            run()
        return self.seconds.pop(0)


def norm_launch(hidden: torch.Tensor | None = None) -> Launch:
    hidden = torch.zeros(2, 20) if hidden is None else hidden
    return add_rms_norm_launch(hidden, torch.ones(2, 20), torch.ones(20), 1e-5, torch.zeros(2, 20))


def store_in(folder: Path, environment: Environment = HERE) -> MeasurementStore:
    store = MeasurementStore.open(folder / "kernels", environment)
    assert store is not None
    return store


@dataclass
class FakeFunction:
    """In a Triton function's place: remembers its calls, and fails with some numbers of warps."""

    failing: tuple[int, ...] = ()
    error: Exception = field(default_factory=lambda: OutOfResources(300_000, 232_448, "shared memory"))
    calls: list[Mapping[str, Any]] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._call

    def _call(self, **arguments: Any) -> None:
        if arguments["num_warps"] in self.failing:
            raise self.error
        self.calls.append(arguments)

    def warmup(self, *, num_warps: int, **_: Any) -> None:
        if num_warps in self.failing:
            raise self.error
        self.loads.append(num_warps)


def fake_launch(function: FakeFunction, **arguments: Any) -> Launch:
    return Launch(
        kernel=Kernel(
            name="fake",
            function=function,
            configs=tuple(Config(constants={"BLOCK": 64}, num_warps=warps) for warps in (4, 8, 16)),
        ),
        grid=lambda _: (1,),
        arguments=arguments,
        constants={},
        shape=(("width", 20), ("arch", "here")),
    )


def contest(calls: list[tuple[str, int, Choices]]) -> Contest:
    def sides(num_tokens: int, choices: Choices) -> tuple[Callable[[], None], Callable[[], None]]:
        return (
            lambda: calls.append(("kernel", num_tokens, choices)),
            lambda: calls.append(("vendor", num_tokens, choices)),
        )

    return Contest(op="op", shape=(("width", 20),), sides=sides)
