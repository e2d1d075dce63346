"""Waiting for one of k servers, by formula.

    Erlang C:       C = P(an arrival waits) of M/M/k, from a = rate * service
    Allen-Cunneen:  mean wait of G/G/k ~ C * service / (k * (1 - rho)) * (ca^2 + cs^2) / 2

(Allen, Probability, Statistics and Queueing Theory, 2nd ed., section 5.4.) Arrivals are taken as Poisson:
ca^2 is 1. The wait of those who wait is taken as exponential, which it is in M/M/k.
"""

from __future__ import annotations

import math


def waits(rate: float, service_s: float, service_cv2: float, num_servers: int) -> tuple[float, float]:
    """(probability to wait, mean wait of those who do, seconds); infinite where the load is too much.

    service_cv2: squared coefficient of variation of the service times.
    """
    load = rate * service_s
    if load >= num_servers:
        return 1.0, math.inf
    probability = erlang_c(load, num_servers)
    spread = (1 + service_cv2) / 2
    return probability, service_s / (num_servers - load) * spread


def erlang_c(load: float, num_servers: int) -> float:
    """load: in servers, below num_servers. By the recursion of Erlang B, which does not overflow."""
    blocked = 1.0
    for server in range(1, num_servers + 1):
        blocked = load * blocked / (server + load * blocked)
    return blocked / (1 - load / num_servers * (1 - blocked))


def share_within(limit_s: float, probability: float, mean_wait_s: float) -> float:
    """Share of arrivals that wait no longer than limit_s."""
    if limit_s < 0:
        return 0.0
    if math.isinf(mean_wait_s):
        return 0.0
    return 1 - probability * math.exp(-limit_s / mean_wait_s) if mean_wait_s else 1.0
