"""One call of a kernel's operator on random data, and what it must give: what `benchmarks.gpu` checks.

A trial is made for a device, or for "meta", where its calls can be found without running them. Its outputs
are poisoned before each run, and lie in memory whose surroundings must stay as they are.

Of an output, in the steps of its element type (torch.finfo.eps): the error's norm may be one step of the
norm of what is expected; one element's four steps of its own size plus the mean one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from engine.kernels.choices import Choices
from engine.kernels.kernel import Config, Launch
from engine.kernels.measurements import Key

GUARD = 7.0
# Elements before and behind a row, and what rows are rounded up to: alignments stay what they are.
_MARGIN = 16
# fp32 sums in another order.
_LEAST_STEP = 1e-5
_ELEMENT_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """run: resets the outputs and computes them.  outputs, expected: in one order.

    guards: whether memory around the outputs is as it was.
    coarsest: the type that values are rounded to on their way, if it is coarser than that of the outputs.
    is_exact: whether outputs equal what is expected bit for bit.
    """

    run: Callable[[Choices], None]
    outputs: Callable[[], Sequence[torch.Tensor]]
    expected: Callable[[], Sequence[torch.Tensor]]
    guards: Sequence[Callable[[], bool]] = ()
    coarsest: torch.dtype | None = None
    is_exact: bool = False

    def fault(self) -> tuple[str, float]:
        """What is wrong with the last run, "" for nothing; and the worst error of an output by its norm."""
        worst = 0.0
        for output, expected in zip(self.outputs(), self.expected(), strict=True):
            if self.is_exact:
                if not torch.equal(output, expected):
                    return "differs", math.inf
                continue
            step = max(torch.finfo(dtype).eps for dtype in (output.dtype, self.coarsest) if dtype)
            words, error = compare(output, expected, step=max(step, _LEAST_STEP))
            if words:
                return words, error
            worst = max(worst, error)
        if not all(is_intact() for is_intact in self.guards):
            return "wrote where it must not", worst
        return "", worst


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCase:
    """kernel: its name.  name: what is awkward about it.  make: the trial on a device."""

    kernel: str
    name: str
    make: Callable[[torch.device], Trial]

    def launches(self) -> list[Launch]:
        """The kernels' calls that it makes, on the meta device."""
        return recorded_launches(self.make(torch.device("meta")))


class Guarded:
    """A tensor amid memory full of GUARD. inner: rows of it, contiguous within themselves."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        *leading, width = shape
        pitch = 2 * _MARGIN + -(-width // _MARGIN) * _MARGIN
        first, *middle = leading
        self._memory = torch.full((first + 2, *middle, pitch), GUARD, dtype=dtype, device=device)
        self.inner = self._memory[1:-1, ..., _MARGIN : _MARGIN + width]

    def is_intact(self) -> bool:
        """Whether what is around the tensor is still there."""
        kept = self.inner.clone()
        self.inner.fill_(GUARD)
        is_intact = bool((self._memory == GUARD).all())
        self.inner.copy_(kept)
        return is_intact


@dataclass(frozen=True, slots=True)
class Recorder(Choices):
    """Choices that run nothing, and remember what they were to run."""

    launches: list[Launch] = field(default_factory=list)

    def run(self, *launches: Launch) -> None:
        """Remembers."""
        self.launches.extend(launches)


def recorded_launches(trial: Trial) -> list[Launch]:
    """The kernels' calls that a trial makes; none is run."""
    recorder = Recorder()
    trial.run(recorder)
    return recorder.launches


def config_choices(launches: Sequence[Launch]) -> list[Choices]:
    """Choices that together run every configuration that the calls' kernels declare for them."""
    configs = {
        (launch.kernel.name, launch.shape): launch.kernel.configs_for(launch.shape) for launch in launches
    }
    count = max(len(of_one) for of_one in configs.values())
    return [Choices(measured=_nth(configs, index)) for index in range(count)]


def _nth(configs: Mapping[Key, tuple[Config, ...]], index: int) -> dict[Key, Config]:
    return {key: of_one[index % len(of_one)] for key, of_one in configs.items()}


def compare(output: torch.Tensor, expected: torch.Tensor, *, step: float) -> tuple[str, float]:
    """What is wrong, "" for nothing, and the error's norm over the norm of what is expected."""
    wide, expected = output.double(), expected.double()
    off = (wide - expected).abs()
    if not bool(torch.isfinite(off).all()):
        return "not finite, or not written", math.inf
    size = float(expected.norm())
    error = float(off.norm()) / size if size else float(off.norm())
    mean = float(expected.square().mean().sqrt()) if expected.numel() else 0.0
    beyond = off > _ELEMENT_STEPS * step * (expected.abs() + mean)
    if error > step:
        return f"off by {error:.2g}, {step:.2g} allowed", error
    if bool(beyond.any()):
        return f"{int(beyond.sum())} elements off, the worst by {float(off.max()):.2g}", error
    return "", error


def normal(*shape: int, dtype: torch.dtype, device: torch.device, deviation: float = 1.0) -> torch.Tensor:
    """Random numbers, of torch's own generator."""
    return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, deviation)


def poison(tensors: Sequence[torch.Tensor]) -> None:
    """Fills them with NaN: what is not written shows."""
    for tensor in tensors:
        tensor.fill_(torch.nan)
