"""How a prompt was computed, in the milliseconds of the message."""

from __future__ import annotations

import pytest

from kvtransfer.prefill_times import write_prefill_times
from tests.engine.tiny_models import make_request


def test_seconds_become_milliseconds_since_the_command_came() -> None:
    request = make_request(range(40), num_cached_tokens=12)
    request.times.begin(100.25)
    request.times.add(16, 0.05)
    request.times.begin(100.5)
    request.times.add(12, 0.025)
    times = write_prefill_times(request, arrived_at=100.0, sampled_at=101.0)
    assert (times.wait_ms, times.total_ms) == (250, 1000)
    assert times.compute_ms == pytest.approx(75)
    assert (times.num_steps, times.num_computed_tokens, times.num_cached_tokens) == (2, 28, 12)


def test_what_never_happened_took_no_time() -> None:
    times = write_prefill_times(make_request(range(40)), arrived_at=100.0, sampled_at=None)
    assert (times.wait_ms, times.compute_ms, times.total_ms, times.num_steps) == (0, 0, 0, 0)
