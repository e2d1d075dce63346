"""What is asked: lengths by a mix or a trace, and prompts of random token ids, all from one seed.

Two sides that are given the same seed, rate and duration get the very same requests. Prompts share no prefix.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from baton.bench.arrivals import bursty_gaps, poisson_gaps, trace_gaps, window
from baton.bench.outcome import Planned
from baton.bench.trace_file import TraceEntry

# Ids below are control tokens in many vocabularies.
FIRST_TOKEN_ID = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """So many of `Mix.block` requests have a length from shortest to longest, uniformly."""

    num_requests: int
    shortest: int
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Prompt lengths. Every `block` requests in a row have exactly these shares, in random order.

    That takes the chance out of how many long prompts a short window has.
    """

    name: str
    shares: tuple[Share, ...]

    @property
    def longest(self) -> int:
        """Of all prompts, in tokens."""
        return max(share.longest for share in self.shares)

    def lengths(self, rng: random.Random) -> Iterator[int]:
        """Prompt lengths without end."""
        while True:
            block = [
                rng.randint(share.shortest, share.longest)
                for share in self.shares
                for _ in range(share.num_requests)
            ]
            rng.shuffle(block)
            yield from block


MIXES = {
    mix.name: mix
    for mix in (
        Mix(
            name="80/15/5",
            shares=(
                Share(num_requests=16, shortest=16, longest=127),
                Share(num_requests=3, shortest=128, longest=512),
                Share(num_requests=1, shortest=513, longest=2000),
            ),
        ),
        Mix(
            name="70/30",
            shares=(
                Share(num_requests=7, shortest=16, longest=100),
                Share(num_requests=3, shortest=1000, longest=2000),
            ),
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A source of windows.

    max_tokens: of every answer, and at most so many where a trace says how many.
    cv: of the gaps: 1 is Poisson, more is bursty; a trace has its own.
    max_prompt_tokens: longer prompts of a trace are cut to it.
    """

    mix: Mix
    vocab_size: int
    max_tokens: int = 32
    cv: float = 1.0
    trace: tuple[TraceEntry, ...] = ()
    max_prompt_tokens: int = 2000

    def __post_init__(self) -> None:
        if self.cv < 1:
            raise ValueError(f"cv is {self.cv}; it must be 1, which is Poisson's, or more")

    @property
    def name(self) -> str:
        """For titles."""
        return "trace" if self.trace else self.mix.name

    @property
    def longest(self) -> int:
        """Of all prompts, in tokens."""
        return self.max_prompt_tokens if self.trace else self.mix.longest

    def window(self, rate: float, duration_s: float, seed: int) -> list[Planned]:
        """The requests of one window at `rate` requests/s."""
        # One generator each, so that how many arrive does not change what they are.
        times = window(self._gaps(random.Random(f"{seed} times")), rate, duration_s)
        sizes = self._sizes(random.Random(f"{seed} sizes"))
        # Of every rate its own: clusters go on from window to window, and would find repeated prompts cached.
        ids = random.Random(f"{seed} {rate} tokens")
        lowest = min(FIRST_TOKEN_ID, self.vocab_size // 2)
        return [
            Planned(
                at_s=at_s,
                token_ids=tuple(ids.choices(range(lowest, self.vocab_size), k=num_prompt_tokens)),
                max_tokens=num_output_tokens,
            )
            for at_s, (num_prompt_tokens, num_output_tokens) in zip(times, sizes, strict=False)
        ]

    def burst(self, num_requests: int, seed: int) -> list[Planned]:
        """So many requests, all at once."""
        # Twice as long as so many take on average; what is more is cut off.
        planned = self.window(1.0, 2.0 * num_requests + 100, seed)[:num_requests]
        return [
            Planned(at_s=0.0, token_ids=request.token_ids, max_tokens=request.max_tokens)
            for request in planned
        ]

    def _gaps(self, rng: random.Random) -> Iterator[float]:
        if self.trace:
            return trace_gaps([entry.at_s for entry in self.trace])
        return poisson_gaps(rng) if self.cv == 1 else bursty_gaps(rng, self.cv)

    def _sizes(self, rng: random.Random) -> Iterator[tuple[int, int]]:
        if self.trace:
            entries = (self.trace[index % len(self.trace)] for index in count())
            return (
                (min(e.num_prompt_tokens, self.max_prompt_tokens), min(e.num_output_tokens, self.max_tokens))
                for e in entries
            )
        return ((length, self.max_tokens) for length in self.mix.lengths(rng))
