"""What is asked of a cluster: how often, how long prompts and answers are, and how soon they are wanted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import Self

from baton.bench.trace_file import TraceEntry
from baton.errors import ConfigError

# Points by which a distribution of lengths stands, that of a trace too: every search goes over all of them.
NUM_POINTS = 64
# Standard normal quantile of 0.9.
_Z90 = NormalDist().inv_cdf(0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """ttft_s, itl_s: wanted; share: of requests whose first token has to come in
    time, and of those whose tokens have to follow in time."""

    ttft_s: float
    itl_s: float
    share: float = 0.95

    def __post_init__(self) -> None:
        for name in ("ttft_s", "itl_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name.removesuffix('_s')} must be above 0", field=name)
        if not 0 < self.share < 1:
            raise ConfigError(f"share is {self.share}; it must lie between 0 and 1", field="share")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """rate: requests per second. prompts: lengths in tokens, equally likely. output: of a mean answer."""

    rate: float
    prompts: tuple[float, ...]
    output: float

    def __post_init__(self) -> None:
        if not (self.rate > 0 and math.isfinite(self.rate)):
            raise ConfigError(f"rate is {self.rate}; it must be above 0", field="rate")
        if not self.prompts or min(self.prompts) < 1:
            raise ConfigError("prompts must have at least one token", field="prompt")
        if self.output < 1:
            raise ConfigError(f"output is {self.output}; an answer has at least one token", field="output")

    @classmethod
    def of_lengths(cls, rate: float, *, median: float, p90: float | None, output: float) -> Self:
        """Prompts of one length, or log-normal with these two quantiles."""
        if p90 is None:
            return cls(rate=rate, prompts=(float(median),), output=output)
        if not p90 >= median >= 1:
            raise ConfigError(
                f"prompt_p90 is {p90}; it must be at least the median, {median}", field="prompt_p90"
            )
        sigma = math.log(p90 / median) / _Z90
        if not sigma:
            return cls(rate=rate, prompts=(float(median),), output=output)
        normal = NormalDist(math.log(median), sigma)
        points = [math.exp(normal.inv_cdf((index + 0.5) / NUM_POINTS)) for index in range(NUM_POINTS)]
        return cls(rate=rate, prompts=tuple(max(1.0, point) for point in points), output=output)

    @classmethod
    def of_trace(cls, entries: Sequence[TraceEntry], rate: float | None) -> Self:
        """As a trace has it, at its own rate unless another is given."""
        seconds = entries[-1].at_s
        if rate is None and not seconds:
            raise ConfigError("the trace has one moment only; give a rate", field="rate")
        outputs = sum(entry.num_output_tokens for entry in entries) / len(entries)
        return cls(
            rate=rate if rate is not None else (len(entries) - 1) / seconds,
            prompts=_condensed(sorted(float(entry.num_prompt_tokens) for entry in entries)),
            output=outputs,
        )

    @property
    def mean_prompt(self) -> float:
        """Tokens."""
        return sum(self.prompts) / len(self.prompts)

    def scaled(self, factor: float) -> Demand:
        """The same with prompts longer by a factor."""
        prompts = tuple(max(1.0, factor * length) for length in self.prompts)
        return Demand(rate=self.rate, prompts=prompts, output=self.output)


def _condensed(lengths: list[float]) -> tuple[float, ...]:
    """Means of NUM_POINTS groups of neighbours, about as many in each; as they are where they are no more.

    lengths: rising.
    """
    count = len(lengths)
    if count <= NUM_POINTS:
        return tuple(lengths)
    edges = [index * count // NUM_POINTS for index in range(NUM_POINTS + 1)]
    groups = [lengths[start:end] for start, end in pairwise(edges)]
    return tuple(sum(group) / len(group) for group in groups)
