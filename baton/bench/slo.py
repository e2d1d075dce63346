"""What a request should keep to, for goodput."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Self

from baton.bench.outcome import Outcome

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Longest times, in milliseconds; None is no limit.

    ttft_ms: to the first token. itl_ms: mean gap between the request's tokens. e2e_ms: to the last token.

    >>> Slo.parse("ttft=0.5s,itl=50ms")
    Slo(ttft_ms=500.0, itl_ms=50.0, e2e_ms=None)
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads "ttft=500ms,itl=50ms,e2e=5s"; a number without a unit is milliseconds. Raises ValueError."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            field, found = f"{name}_ms", _DURATION.fullmatch(value)
            if field not in {known.name for known in fields(cls)} or found is None or field in limits:
                raise ValueError(
                    f"{part!r} is no objective; write ttft=500ms,itl=50ms,e2e=5s, or some of them"
                )
            limits[field] = float(found[1]) * (1000 if found[2] == "s" else 1)
        return cls(**limits)

    def is_met(self, outcome: Outcome) -> bool:
        """Whether the request was answered completely and within all limits."""
        if not outcome.is_complete:
            return False
        limits = (self.ttft_ms, self.itl_ms, self.e2e_ms)
        measured_s = (outcome.ttft_s, outcome.mean_itl_s, outcome.e2e_s)
        pairs = zip(limits, measured_s, strict=True)
        return all(limit is None or 1000 * value_s <= limit for limit, value_s in pairs)
