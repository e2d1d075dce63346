"""The figures of a run. Arithmetic only; what each one means is in docs/cli.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.bench.outcome import Outcome
from baton.bench.percentiles import percentile
from baton.bench.slo import Slo

PERCENTS = (50, 90, 99)
LATENCIES = ("ttft_ms", "itl_ms", "e2e_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of all requests of a run.

    duration_s: from the start to the end of the last request.
    """

    outcomes: Sequence[Outcome]
    duration_s: float
    slo: Slo | None = None

    @property
    def complete(self) -> list[Outcome]:
        """Those that were answered completely."""
        return [outcome for outcome in self.outcomes if outcome.is_complete]

    @property
    def errors(self) -> dict[str, int]:
        """How many failed, by code. An answer that ended early without an error counts as SHORT."""
        return dict(Counter(o.failure or "SHORT" for o in self.outcomes if not o.is_complete).most_common())

    @property
    def error_details(self) -> dict[str, str]:
        """What the first request that failed with a code was told."""
        details: dict[str, str] = {}
        for outcome in self.outcomes:
            if outcome.failure:
                details.setdefault(outcome.failure, outcome.detail)
        return details

    def latencies(self, name: str) -> list[float]:
        """All values of one of LATENCIES, in milliseconds, of the complete requests."""
        if name == "itl_ms":
            return [1000 * gap for outcome in self.complete for gap in outcome.gaps_s]
        field = name.replace("_ms", "_s")
        return [1000 * getattr(outcome, field) for outcome in self.complete]

    def distribution(self, name: str) -> dict[str, float] | None:
        """Percentiles, mean and maximum; None without a value."""
        values = self.latencies(name)
        if not values:
            return None
        shown = {f"p{percent}": percentile(values, percent) for percent in PERCENTS}
        return {**shown, "mean": sum(values) / len(values), "max": max(values)}

    def per_second(self, amount: float) -> float:
        """A rate over the whole run; 0 for a run that took no time."""
        return amount / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def goodput(self) -> float | None:
        """Requests/s that met the objectives; None without any."""
        if self.slo is None:
            return None
        return self.per_second(sum(map(self.slo.is_met, self.outcomes)))

    def as_dict(self) -> dict[str, Any]:
        """All figures, as plain JSON values."""
        complete = self.complete
        num_met = None if self.slo is None else sum(map(self.slo.is_met, self.outcomes))
        return {
            "duration_s": self.duration_s,
            "num_requests": len(self.outcomes),
            "num_complete": len(complete),
            "num_met": num_met,
            "errors": self.errors,
            "error_details": self.error_details,
            "requests_per_s": self.per_second(len(complete)),
            "input_tokens_per_s": self.per_second(sum(o.num_prompt_tokens for o in complete)),
            "output_tokens_per_s": self.per_second(sum(len(o.token_s) for o in complete)),
            "goodput_requests_per_s": self.goodput,
            **{name: self.distribution(name) for name in LATENCIES},
            "sent_late_ms_max": 1000 * max((outcome.late_s for outcome in self.outcomes), default=0.0),
        }
