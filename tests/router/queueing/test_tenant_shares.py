"""Which tenant may claim the bound on waiting, by arithmetic."""

from __future__ import annotations

from router.queueing.tenant_shares import TenantShares
from router.queueing.waiting import Waiting


def make_item(tenant: str, at: float, cost_ms: float = 100.0, weight: float = 1.0) -> Waiting[str]:
    return Waiting(
        value=tenant,
        num_tokens=1,
        enqueued_at=at,
        deadline_at=0.0,
        cost_ms=cost_ms,
        tenant=tenant,
        weight=weight,
        number=int(at * 1000),
    )


def make_shares(*items: Waiting[str]) -> TenantShares[str]:
    shares: TenantShares[str] = TenantShares(slack_ms=100.0)
    for item in items:
        shares.add(item)
    return shares


def test_the_oldest_item_is_named() -> None:
    assert make_shares().oldest() is None
    first, second = make_item("a", 1.0), make_item("b", 2.0)
    shares = make_shares(second, first)
    assert shares.oldest() is first
    shares.discard(first)
    assert shares.oldest() is second


def test_a_tenant_more_than_the_slack_ahead_may_not_claim_it() -> None:
    old, new = make_item("a", 1.0), make_item("b", 2.0)
    shares = make_shares(old, new)
    shares.charge(old)
    assert shares.oldest() is old
    shares.charge(old)
    assert shares.oldest() is new
    shares.charge(new)
    assert shares.oldest() is old


def test_a_weight_divides_what_was_served() -> None:
    old, new = make_item("a", 1.0, weight=4.0), make_item("b", 2.0)
    shares = make_shares(old, new)
    for _ in range(4):
        shares.charge(old)
    assert shares.oldest() is old
    shares.charge(old)
    assert shares.oldest() is new


def test_a_tenant_that_did_not_wait_starts_level_with_the_least_served() -> None:
    old = make_item("a", 1.0)
    shares = make_shares(old)
    for _ in range(10):
        shares.charge(old)
    shares.add(make_item("b", 2.0))
    assert shares.oldest() is old


def test_one_tenant_alone_is_never_ahead() -> None:
    old = make_item("a", 1.0)
    shares = make_shares(old)
    for _ in range(10):
        shares.charge(old)
    assert shares.oldest() is old
