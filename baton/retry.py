"""When a client asks again after a failure: the policy, and the tries of one request.

Plain values: time is an argument, chance a random.Random; nothing here calls or waits.

Before its first token a request that failed for now is simply asked again. After it, what makes the
answer go on at another router is the loss of the router, or its word that it is about to leave; another
error that a router reports in the middle of an answer is its answer, after it has tried what it can.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Final

from baton.errors import BatonError, Cancelled, ConfigError, Draining, Overloaded, Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How long and how often a client asks again; for the first token and for what follows alike.

    total_s: longest time from a failure to the next token, in seconds, whatever fails in between; it begins
        anew where a router leaves as planned that had accepted the request. 0 never asks again.
    max_attempts: most calls without a new token between them; 1 never asks again; None sets no bound
        beside total_s.
    initial_s: longest pause before the first further call, in seconds; it doubles with each.
    max_s: what it doubles up to, in seconds.

    A pause is drawn from 0 to the longest (full jitter), because all clients of a router lose it at the
    same moment, and ends within total_s. What a full router asks for (retry_after_s) is added; an error that
    asks for more than is left of total_s is raised at once.

    Raises ConfigError, naming the field, for a value out of range.

    >>> Retry(total_s=60.0)
    Retry(total_s=60.0, max_attempts=None, initial_s=0.25, max_s=1.0)
    """

    total_s: float = 15.0
    max_attempts: int | None = None
    initial_s: float = 0.25
    max_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("total_s", "initial_s", "max_s"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} of retry is {value!r}; it must be seconds, 0 or more", field=name)
        attempts = self.max_attempts
        is_count = isinstance(attempts, int) and not isinstance(attempts, bool) and attempts >= 1
        if attempts is not None and not is_count:
            raise ConfigError(
                f"max_attempts of retry is {attempts!r}; it must be a whole number from 1, or None",
                field="max_attempts",
            )

    @property
    def is_once(self) -> bool:
        """Whether nothing is ever asked again."""
        return self.max_attempts == 1 or self.total_s == 0


DEFAULT_RETRY: Final = Retry()


class Tries:
    """The calls of one request. rng: spreads the tries of clients that lose the same router."""

    def __init__(self, retry: Retry, rng: random.Random) -> None:
        self._retry = retry
        self._rng = rng
        self._failed_at: float | None = None
        self._num_calls = 1
        self._longest_pause_s = retry.initial_s

    @property
    def is_searching(self) -> bool:
        """Whether a call has failed and nothing new has come since."""
        return self._failed_at is not None

    def progress(self) -> None:
        """Something new has come: a later failure is another one."""
        self._failed_at = None
        self._num_calls = 1
        self._longest_pause_s = self._retry.initial_s

    def pause_after(
        self,
        failure: BatonError,
        now: float,
        *,
        is_routers_word: bool,
        was_accepted: bool = False,
        has_begun: bool = False,
    ) -> float | None:
        """Seconds until the next call; None if the failure is final.

        Args:
            failure: what ended the call.
            now: the clock, in seconds.
            is_routers_word: a router said so itself; otherwise the router is gone.
            was_accepted: the call was, by the router that it failed at.
            has_begun: tokens have come.
        """
        retry = self._retry
        if was_accepted and isinstance(failure, Draining):
            # Until then it waited in a queue, as it should; that a router leaves as planned costs nobody.
            self.progress()
        is_worth_it = _passes(failure, is_routers_word=is_routers_word) or (
            # A router that is shut down cancels its calls.
            self.is_searching and isinstance(failure, Cancelled)
        )
        if has_begun and not self.is_searching:
            is_worth_it &= isinstance(failure, Draining) or not is_routers_word
        self._failed_at = now if self._failed_at is None else self._failed_at
        # A router without workers has just begun, and is soon asked again; a full one says how long it takes.
        wait_s = (failure.retry_after_s or 0.0) if isinstance(failure, Overloaded) else 0.0
        left_s = retry.total_s - (now - self._failed_at) - wait_s
        is_late = left_s < 0
        is_spent = retry.max_attempts is not None and self._num_calls >= retry.max_attempts
        if not is_worth_it or is_late or is_spent or retry.is_once:
            return None
        pause_s = wait_s + self._rng.uniform(0, min(self._longest_pause_s, left_s))
        self._num_calls += 1
        self._longest_pause_s = min(2 * self._longest_pause_s, max(retry.initial_s, retry.max_s))
        return pause_s


def _passes(failure: BatonError, *, is_routers_word: bool) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(failure, Cancelled):
        return not is_routers_word
    return isinstance(failure, Unavailable | Overloaded)
