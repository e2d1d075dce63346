"""Lengths of prompts and answers: one, a range, or a mix of them."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Self

_PART = re.compile(r"(?:(?P<weight>\d+(?:\.\d+)?):)?(?P<shortest>\d+)(?:-(?P<longest>\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Lengths from shortest to longest, all equally likely; weight says how often the span is drawn."""

    weight: float
    shortest: int
    longest: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """A mix of spans, in tokens. Each draw takes a span by weight, then a length of it.

    >>> Lengths.parse("80:100,20:1000-2000").spans[1].longest
    2000
    """

    spans: tuple[Span, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads "512", "100-200", or a mix with weights, "80:100,20:1500"; raises ValueError saying so."""
        return cls(tuple(_span(part) for part in text.split(",")))

    def draw(self, rng: random.Random) -> int:
        """One length."""
        (span,) = rng.choices(self.spans, weights=[span.weight for span in self.spans])
        return rng.randint(span.shortest, span.longest)


def _span(part: str) -> Span:
    found = _PART.fullmatch(part.strip())
    if found is None:
        raise ValueError(f"{part!r} is no length; write 512, 100-200, or a mix such as 80:100,20:1500")
    shortest = int(found["shortest"])
    longest = int(found["longest"] or shortest)
    weight = float(found["weight"] or 1)
    if not 1 <= shortest <= longest or weight <= 0:
        raise ValueError(f"{part!r} must have 1 or more tokens, the smaller number first, and some weight")
    return Span(weight=weight, shortest=shortest, longest=longest)
