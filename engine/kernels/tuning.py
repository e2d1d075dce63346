"""Measures kernels on this device: each in all of its configurations, and against the vendor's operators.

Everything runs on copies: a kernel that works in place is run many times over, and nobody's data may hear of
it. What an earlier start measured is read from the disk. Knows neither models nor devices: it gets calls, and
a timer to run them with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from triton.errors import TritonError

from baton.errors import ConfigError, InternalError
from baton.logs import get_logger
from engine.kernels.choices import Choices
from engine.kernels.kernel import Config, Launch, Shape
from engine.kernels.measurement_store import MeasurementStore
from engine.kernels.measurements import Key, Ladder, Measurements, Race, Rung
from engine.kernels.timing import Timer

# Powers of two up to where prompts are cut into chunks.
LADDER = tuple(1 << power for power in range(12))
# Bytes: what Triton's dispatcher wants to know of an address.
_ALIGNMENT = 16
# Out of registers, shared memory or threads, or beyond what the compiler can do.
_FAILURES = (TritonError, RuntimeError)
_REMEDY = "set kernels to torch, which computes without them"

# Of a contest: calls of the kernel and of the vendor's operators, which compute the same.
Sides = tuple[Callable[[], object], Callable[[], object]]

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """An operator that vendors have too, made of several of theirs.

    shape: what its outcome hangs on, beside the device.
    sides: of a number of tokens, and of the choices for the kernels that take part.
    """

    op: str
    shape: Shape
    sides: Callable[[int, Choices], Sides]

    @property
    def key(self) -> Key:
        """What it is found by."""
        return self.op, self.shape


def _as_it_is(launch: Launch) -> Launch:
    return launch


def tune(
    launches: Iterable[Launch],
    contests: Sequence[Contest] = (),
    *,
    timer: Timer,
    store: MeasurementStore | None = None,
    made: Callable[[Launch], Launch] = _as_it_is,
) -> Choices:
    """The fastest configuration for every kernel and shape among the calls, and every contest's crossing.

    launches: each is dropped before the next is asked for. The first one of a shape stands for all.
    store: what is known already; what is measured is added. Blocks while another process measures.
    made: makes a call with data from one without; asked only for what is to be measured.
    Raises InternalError for a kernel of which no configuration runs, ConfigError where the device's memory is
    too small.
    """
    with nullcontext() if store is None else store.exclusive():
        known = Measurements() if store is None else store.read()
        for measured in _measured(known, launches, contests, timer, made):
            # At once: a start that is cut off here has got that far.
            if store is not None:
                store.write(measured)
            known = measured
    return known.choices([contest.key for contest in contests])


def _measured(
    known: Measurements,
    launches: Iterable[Launch],
    contests: Sequence[Contest],
    timer: Timer,
    made: Callable[[Launch], Launch],
) -> Iterator[Measurements]:
    """What is known after each measurement that was missing."""
    for launch in launches:
        if not _is_known(known, launch):
            with _translated(f"measuring the kernel {launch.kernel.name}"):
                race = _race(made(launch), timer)
            yield (known := known.with_race(race))
    choices = known.choices()
    for contest in contests:
        if contest.key not in known.ladders:
            with _translated(f"measuring {contest.op} against the vendor's operators"):
                ladder = _ladder(contest, choices, timer)
            yield (known := known.with_ladder(ladder))


def _is_known(known: Measurements, launch: Launch) -> bool:
    race = known.races.get((launch.kernel.name, launch.shape))
    return race is not None and race.winner in launch.kernel.configs_for(launch.shape)


def _race(launch: Launch, timer: Timer) -> Race:
    configs, times, reason = launch.kernel.configs_for(launch.shape), [], ""
    for config in configs:
        copy = copied(launch)
        try:
            times.append((config, timer(partial(copy.run, config))))
        except torch.OutOfMemoryError:
            # No fault of the configuration.
            raise
        except _FAILURES as error:
            reason = _reason(error)
            log.warning(
                "configuration dropped",
                kernel=launch.kernel.name,
                configuration=str(config),
                reason=reason,
            )
    if not times:
        raise InternalError(
            f"no configuration of the kernel {launch.kernel.name} runs for {dict(launch.shape)}: {reason}; "
            f"{_REMEDY}",
            field="kernels",
        )
    race = Race(kernel=launch.kernel.name, shape=launch.shape, num_declared=len(configs), times=tuple(times))
    log.info("kernel measured", kernel=race.kernel, shape=dict(race.shape), chosen=str(race.winner))
    return race


def _ladder(contest: Contest, choices: Choices, timer: Timer) -> Ladder:
    rungs = tuple(_rung(contest, num_tokens, choices, timer) for num_tokens in LADDER)
    ladder = Ladder(op=contest.op, shape=contest.shape, rungs=rungs)
    log.info("operator measured", operator=contest.op, kernel_from_tokens=ladder.crossing)
    return ladder


def _rung(contest: Contest, num_tokens: int, choices: Choices, timer: Timer) -> Rung:
    kernel, vendor = contest.sides(num_tokens, choices)
    return Rung(num_tokens=num_tokens, kernel_s=timer(kernel), vendor_s=timer(vendor))


def loaded(launches: Iterable[Launch], choices: Choices) -> Choices:
    """Compiles the calls for this device and loads them; nothing runs, so they need no data.

    So serving compiles nothing: each call is loaded in its chosen configuration, and in the first declared
    one that loads, which is taken where a shape was not measured. Where that is not the first of all, it is
    added to the choices.
    Raises InternalError for a kernel of which no configuration loads.
    """
    further: dict[Key, Config] = {}
    for launch in launches:
        key = (launch.kernel.name, launch.shape)
        chosen = choices.measured.get(key) or further.get(key)
        first = _load_first(launch)
        if chosen is not None:
            with _translated(f"loading the kernel {launch.kernel.name}"):
                launch.load(chosen)
        elif first != launch.kernel.configs_for(launch.shape)[0]:
            further[key] = first
    return replace(choices, measured={**choices.measured, **further})


def _load_first(launch: Launch) -> Config:
    reason = ""
    for config in launch.kernel.configs_for(launch.shape):
        try:
            launch.load(config)
        except _FAILURES as error:
            reason = _reason(error)
        else:
            return config
    raise InternalError(
        f"no configuration of the kernel {launch.kernel.name} loads for {dict(launch.shape)}: {reason}; "
        f"{_REMEDY}",
        field="kernels",
    )


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{what} ran out of the device's memory: {_reason(error)}; free some there, or {_REMEDY}",
            field="kernels",
        ) from error
    except _FAILURES as error:
        raise InternalError(f"{what} failed: {_reason(error)}; {_REMEDY}", field="kernels") from error


def _reason(error: Exception) -> str:
    return str(error).strip() or type(error).__name__


def copied(launch: Launch) -> Launch:
    """The same call on tensors of its own, with the values, strides and alignments of the others."""
    return replace(
        launch, arguments={name: _copied_argument(value) for name, value in launch.arguments.items()}
    )


def _copied_argument(value: Any) -> Any:
    """A tensor's copy has its strides and its alignment, so the program that runs is the same."""
    if not isinstance(value, torch.Tensor):
        return value
    sizes_and_strides = zip(value.shape, value.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in sizes_and_strides) if value.numel() else 0
    lead = value.data_ptr() % _ALIGNMENT // value.element_size()
    memory = torch.empty(lead + span, dtype=value.dtype, device=value.device)
    memory[lead:].copy_(value.as_strided((span,), (1,)))
    return memory.as_strided(value.shape, value.stride(), lead)
