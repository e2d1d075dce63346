"""What tenants may use per minute, over all routers of the cluster.

A synchronous core: time comes in as an argument. Each router decides alone and at once, by its own
token buckets (router/tenancy/token_bucket.py); it publishes what it has admitted and hears what the others
have. It must not know how that travels (router/tenancy/rate_sync.py) or who a caller is
(router/tenancy/tenants.py).

What a router has admitted is counted per window of WINDOW_S seconds of wall-clock time. A count only
grows, and it is published whole: saying it twice, or again to a Redis that was emptied, changes nothing.

**Bound.** Whatever callers do, all n routers together admit of one tenant in T minutes at most

    limit x (1 + T) + (n - 1) x (the most that one router admits between its saying and the others' hearing)

The first part is what one bucket allows: a full one, and its refill. The second is at most n - 1 full
buckets, once: what was admitted too much is missing in all buckets afterwards, so that it comes on top
of any span once, not once per span. Two intervals of the exchange lie between saying and hearing. On
top comes what nobody decides beforehand: output tokens, charged when they are there, and one
prompt larger than the bucket per router. What a router admitted in the interval in which it died is lost.

While Redis is away, each router takes the others to go on at their last rate, but for a tenth of the
refill, which it keeps: they may be gone. So all together stay near the limit as long as callers stay where
they were; if they do not, each router admits at most what its own bucket allows. A router that alone
cannot reach Redis is not heard, and adds its last share of the limit for as long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from baton.errors import Overloaded
from router.tenancy.tenants import Tenant
from router.tenancy.token_bucket import TokenBucket, backlog

# The clocks of routers may differ by as much: a router reads the windows before and after its own too.
WINDOW_S: Final = 10
# A bucket that nobody touches is full after a minute; what is older need not be known.
NUM_WINDOWS: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one router has admitted of one tenant in one window so far.

    router: its incarnation.
    window: wall-clock time in seconds // WINDOW_S.
    """

    router: int
    tenant: str
    window: int
    num_requests: int
    num_tokens: int


@dataclass(slots=True)
class _Counts:
    requests: int = 0
    tokens: int = 0

    def add(self, requests: int, tokens: int) -> None:
        self.requests += requests
        self.tokens += tokens


@dataclass(slots=True)
class _Account:
    """One tenant's buckets, by the name of their limit, and what was counted.

    pending: of no window yet. own: by window. others: by window and router.
    unsaid: windows whose count may not have been published.
    """

    buckets: dict[str, TokenBucket]
    pending: _Counts = field(default_factory=_Counts)
    own: dict[int, _Counts] = field(default_factory=dict)
    others: dict[tuple[int, int], _Counts] = field(default_factory=dict)
    unsaid: set[int] = field(default_factory=set)

    def use(self, now: float, requests: int, tokens: int) -> None:
        """This router admitted as much."""
        for name, bucket in self.buckets.items():
            bucket.take(now, _amount(name, requests, tokens))
        self.pending.add(requests, tokens)

    def close_pending(self, window: int) -> None:
        """What is pending belongs to that window; what is too old to be of use is forgotten."""
        if self.pending != _Counts():
            self.own.setdefault(window, _Counts()).add(self.pending.requests, self.pending.tokens)
            self.unsaid.add(window)
            self.pending = _Counts()
        kept = _kept(window)
        self.own = {key: counts for key, counts in self.own.items() if key in kept}
        self.others = {key: counts for key, counts in self.others.items() if key[0] in kept}
        self.unsaid &= self.own.keys()

    def news(self, usage: Usage) -> _Counts:
        """What is new in another router's count."""
        known = self.others.setdefault((usage.window, usage.router), _Counts())
        more = _Counts(max(0, usage.num_requests - known.requests), max(0, usage.num_tokens - known.tokens))
        known.add(more.requests, more.tokens)
        return more

    def hear(self, now: float, news: dict[int, _Counts], *, is_first: bool) -> None:
        """Drains what others took, by window; the first time their last minute stands in it."""
        for name, bucket in self.buckets.items():
            amounts = [_amount(name, counts.requests, counts.tokens) for _, counts in sorted(news.items())]
            missing = backlog(bucket.per_minute, amounts, WINDOW_S) if is_first else sum(amounts)
            bucket.hear(now, missing)


class RateLimits:
    """The limits of all tenants, as one router keeps them.

    tenants: those without a limit are never refused, nor counted.
    incarnation: this router's; what it has admitted is told apart by that.
    """

    def __init__(self, tenants: Iterable[Tenant], incarnation: int) -> None:
        self._incarnation = incarnation
        self._accounts = {tenant.name: _account(tenant) for tenant in tenants if tenant.is_limited}
        self._num_heard = 0

    @property
    def has_limits(self) -> bool:
        """Whether there is anything to exchange with other routers."""
        return bool(self._accounts)

    def take(self, tenant: Tenant, now: float, num_tokens: int, *, num_requests: int = 1) -> None:
        """Admits a request of that many prompt tokens.

        num_requests: 0 for one that was admitted already, before its tokens were known.

        Raises Overloaded, naming the limit and when to come back, if the tenant has reached one.
        """
        account = self._accounts.get(tenant.name)
        if account is None:
            return
        waits = {
            name: bucket.wait_s(now, _amount(name, num_requests, num_tokens))
            for name, bucket in account.buckets.items()
        }
        name = max(waits, key=waits.__getitem__)
        if waits[name] > 0:
            # Rounded up: who comes back a fraction of a millisecond early is refused once more.
            raise Overloaded(
                f"tenant {tenant.name!r} has used up {name}, {account.buckets[name].per_minute}; "
                f"try again in {waits[name]:.3g} s",
                field=name,
                retry_after_s=math.ceil(1000 * waits[name]) / 1000,
            )
        account.use(now, num_requests, num_tokens)

    def charge(self, tenant: Tenant, now: float, num_tokens: int) -> None:
        """Counts output tokens, which nobody knew of at admission; they may leave less than nothing."""
        account = self._accounts.get(tenant.name)
        if account is not None and num_tokens:
            account.use(now, 0, num_tokens)

    def say(self, window: int) -> list[Usage]:
        """What is to be published, now that it is that window; it stays so until hear() follows."""
        said = []
        for name, account in self._accounts.items():
            account.close_pending(window)
            for key in sorted(account.unsaid):
                counts = account.own[key]
                said.append(
                    Usage(
                        router=self._incarnation,
                        tenant=name,
                        window=key,
                        num_requests=counts.requests,
                        num_tokens=counts.tokens,
                    )
                )
        return said

    def windows(self, window: int) -> list[int]:
        """The windows to be read: first the whole last minute, then the recent ones and one of the others."""
        kept = _kept(window)
        if not self._num_heard:
            return list(kept)
        # A router that could not reach Redis for a while says later what was. There is no hurry about that.
        older, recent = kept[:-3], kept[-3:]
        return [older[self._num_heard % len(older)], *recent]

    def hear(self, usages: Iterable[Usage], window: int, now: float) -> None:
        """What say() returned is published, and this is what stands in windows(window)."""
        kept = _kept(window)
        news = {name: {key: _Counts() for key in kept[:-1]} for name in self._accounts}
        for usage in usages:
            if usage.router != self._incarnation and usage.window in kept and usage.tenant in news:
                more = self._accounts[usage.tenant].news(usage)
                # The window after this one is the present of another clock.
                news[usage.tenant][min(usage.window, window)].add(more.requests, more.tokens)
        for name, account in self._accounts.items():
            account.unsaid.clear()
            account.hear(now, news[name], is_first=self._num_heard == 0)
        self._num_heard += 1

    def lose(self, now: float) -> None:
        """The exchange failed: the others are assumed to go on as before, until hear()."""
        for account in self._accounts.values():
            for bucket in account.buckets.values():
                bucket.assume(now)


def _account(tenant: Tenant) -> _Account:
    limits = {
        "requests_per_minute": tenant.requests_per_minute,
        "tokens_per_minute": tenant.tokens_per_minute,
    }
    return _Account({name: TokenBucket(limit) for name, limit in limits.items() if limit is not None})


def _amount(limit: str, requests: int, tokens: int) -> int:
    return requests if limit == "requests_per_minute" else tokens


def _kept(window: int) -> range:
    return range(window - NUM_WINDOWS, window + 2)
