"""What became of requests, and whether that was good enough.

Arithmetic only: it knows neither clocks nor clusters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.bench.outcome import Outcome
from baton.bench.percentiles import percentile

ATTAINMENT = 0.9
# Prompt lengths are reported in these classes: upper ends, in tokens, inclusive.
CLASSES = {"short": 127, "medium": 512}


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """What a request should take: ttft_base_s + ttft_per_token_s for each prompt token, and mean_itl_s."""

    ttft_base_s: float = 0.5
    ttft_per_token_s: float = 0.003
    mean_itl_s: float = 0.150

    def allowed_ttft_s(self, num_prompt_tokens: int) -> float:
        """Longest time to the first token."""
        return self.ttft_base_s + self.ttft_per_token_s * num_prompt_tokens

    def strain(self, outcome: Outcome) -> float:
        """The larger of both latencies over its objective: at most 1 is met. Incomplete is infinite."""
        if not outcome.is_complete:
            return math.inf
        ttft = outcome.ttft_s / self.allowed_ttft_s(outcome.num_prompt_tokens)
        return max(ttft, outcome.mean_itl_s / self.mean_itl_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The outcomes of one side at one rate, in requests/s. deadline_s: that of its requests."""

    side: str
    rate: float
    round_number: int
    outcomes: tuple[Outcome, ...]
    objectives: Objectives
    deadline_s: float = 20.0

    @property
    def num_met(self) -> int:
        """Requests that met both objectives."""
        return sum(self.objectives.strain(outcome) <= 1 for outcome in self.outcomes)

    @property
    def attainment(self) -> float:
        """Share of all requests that met both objectives; failed and refused ones did not."""
        return self.num_met / len(self.outcomes) if self.outcomes else 0.0

    @property
    def is_attained(self) -> bool:
        """Whether enough did."""
        return self.strain <= 1

    @property
    def strain(self) -> float:
        """What ATTAINMENT of the requests keep to: at most 1 exactly if the window is attained."""
        strains = sorted(map(self.objectives.strain, self.outcomes))
        return strains[_num_needed(len(strains)) - 1] if strains else math.inf

    def ttft_ms(self, percent: int, longest: int | None = None, shortest: int = 0) -> float | None:
        """Percentile over the requests with prompts from shortest to longest tokens.

        One that got no token counts with deadline_s: no side is better for leaving out what it cannot do.
        """
        found = [
            1000 * (outcome.ttft_s if outcome.token_s else self.deadline_s)
            for outcome in self.outcomes
            if shortest <= outcome.num_prompt_tokens <= (longest or math.inf)
        ]
        return percentile(found, percent) if found else None

    def itl_ms(self, percent: int) -> float | None:
        """Percentile over all gaps between tokens; 100 is the worst."""
        gaps = [1000 * gap for outcome in self.outcomes for gap in outcome.gaps_s]
        if not gaps:
            return None
        return max(gaps) if percent == 100 else percentile(gaps, percent)

    def facts(self) -> dict[str, object]:
        """For the record; times in ms. What got no token has the deadline as its TTFT, and no gaps."""
        return {
            "side": self.side,
            "rate": round(self.rate, 4),
            "round": self.round_number,
            "requests": len(self.outcomes),
            "met": self.num_met,
            "strain": _rounded(self.strain),
            "failures": dict(Counter(o.failure for o in self.outcomes if o.failure)),
            "ttft_ms": self._ttfts(),
            "itl_ms": {f"p{percent}": _rounded(self.itl_ms(percent)) for percent in (50, 99, 100)},
            "sent_late_ms_max": _rounded(1000 * max((o.late_s for o in self.outcomes), default=0.0)),
        }

    def _ttfts(self) -> dict[str, dict[str, float | None]]:
        lows = (0, *(end + 1 for end in CLASSES.values()))
        highs = (*CLASSES.values(), None)
        spans = {"all": (0, None)} | {
            name: (low, high) for name, low, high in zip((*CLASSES, "long"), lows, highs, strict=True)
        }
        return {
            name: {f"p{percent}": _rounded(self.ttft_ms(percent, high, low)) for percent in (50, 90, 99)}
            for name, (low, high) in spans.items()
        }


def goodput(attainments: Mapping[float, float], share: float = ATTAINMENT) -> float:
    """The highest rate at which at least `share` of the requests met theirs, as at every lower measured rate.

    attainments: share of requests by rate. 0 if the lowest rate fails already. A rate that attains above
    one that does not is chance, and is not counted.
    """
    best = 0.0
    for rate in sorted(attainments):
        if attainments[rate] < share:
            break
        best = rate
    return best


def pooled(windows: Sequence[Window]) -> dict[float, float]:
    """Attainment by rate over all windows of one side: requests that met theirs over all requests."""
    met: Counter[float] = Counter()
    sent: Counter[float] = Counter()
    for measured in windows:
        met[measured.rate] += measured.num_met
        sent[measured.rate] += len(measured.outcomes)
    return {rate: met[rate] / sent[rate] for rate in sent if sent[rate]}


def _num_needed(num_requests: int) -> int:
    # 0.9 is a little more than nine tenths in binary; the slack keeps 0.9 * 10 at nine.
    return math.ceil(ATTAINMENT * num_requests - 1e-9)


def _rounded(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else round(value, 3)
