"""Writes how a prompt was computed, whichever worker did it."""

from __future__ import annotations

from baton.v1 import common_pb2
from engine.request import Request


def write_prefill_times(
    request: Request, *, arrived_at: float, sampled_at: float | None
) -> common_pb2.PrefillTimes:
    """The message for one attempt.

    arrived_at: when its command came.  sampled_at: when its first token was sampled; None if none was.
        Both in seconds of the event loop's clock.
    """
    times = request.times
    return common_pb2.PrefillTimes(
        wait_ms=0 if times.began_at is None else 1000 * (times.began_at - arrived_at),
        compute_ms=1000 * times.compute_s,
        total_ms=0 if sampled_at is None else 1000 * (sampled_at - arrived_at),
        num_steps=times.num_steps,
        num_computed_tokens=times.num_tokens,
        num_cached_tokens=request.num_cached_tokens,
    )
