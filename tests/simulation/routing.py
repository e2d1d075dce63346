"""How a seed's routers route, and for whom: placement, what they learn, tenants, priorities, objectives.

Owns the draws for it, which are apart from all others: a plan kept before there were any stands for the
defaults here, and a seed's prompts and faults are the same with and without.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from baton.api_keys import ApiKey
from baton.v1 import common_pb2
from router.tenancy.tenants import Tenant, Tenants

if TYPE_CHECKING:
    from tests.simulation.plan import RequestPlan

NAMES = ("heavy", "light")
# How long a request waits before nobody overtakes it any more.
MAX_WAIT_S = 3.0
LOW, NORMAL, HIGH = common_pb2.PRIORITY_LOW, common_pb2.PRIORITY_NORMAL, common_pb2.PRIORITY_HIGH


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingPlan:
    """What a seed's routers have in common.

    weights: of the tenants NAMES; without any, nobody is told apart.
    output_quantile: of answers that growth is kept free for; 0 keeps none.
    """

    placement: str = "disaggregated"
    local_max_tokens: int = 256
    learn_buckets: bool = False
    output_quantile: float = 0.0
    itl_objective_ms: float = 150.0
    weights: tuple[float, ...] = ()


def draw_routing(seed: int) -> RoutingPlan:
    """The routing of a seed."""
    rng = random.Random(f"{seed}/routing")
    return RoutingPlan(
        placement=rng.choice(("auto", "disaggregated", "auto", "auto", "disaggregated", "colocated")),
        local_max_tokens=rng.choice((8, 16, 256)),
        learn_buckets=rng.random() < 0.5,
        output_quantile=rng.choice((0.0, 0.9)),
        # Steps take longer than 150 ms in most plans, and then a decode worker computes hardly a prompt.
        itl_objective_ms=rng.choice((150.0, 1000.0, 10_000.0)),
        weights=rng.choice(((), (3.0, 1.0), (1.0, 1.0))),
    )


def with_callers(
    seed: int, routing: RoutingPlan, requests: tuple[RequestPlan, ...]
) -> tuple[RequestPlan, ...]:
    """The requests with who sends them, how urgent they are, and what they will not wait for."""
    rng = random.Random(f"{seed}/callers")
    has_priorities, strict = rng.random() < 0.6, rng.choice((0.0, 0.0, 0.15, 0.3))
    # A tenant that floods, so that there is something to be fair about.
    heavy = rng.choice((0.5, 0.85))
    return tuple(
        replace(
            request,
            tenant=NAMES[rng.random() >= heavy] if routing.weights else "",
            priority=rng.choice((LOW, NORMAL, NORMAL, HIGH)) if has_priorities else NORMAL,
            ttft_objective_ms=rng.uniform(50.0, 4000.0) if rng.random() < strict else None,
        )
        for request in requests
    )


def key_of(tenant: str) -> ApiKey | None:
    """What a tenant shows; None where nobody is told apart."""
    return ApiKey(f"the-key-of-the-{tenant}-tenant") if tenant else None


def tenants_of(routing: RoutingPlan) -> Tenants:
    """Those whom a router knows."""
    known = {}
    for name, weight in zip(NAMES, routing.weights, strict=False):
        key = key_of(name)
        assert key is not None
        known[Tenant(name=name, weight=weight, max_priority=HIGH)] = [key.digest]
    return Tenants(known)
