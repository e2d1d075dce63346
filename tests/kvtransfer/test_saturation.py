"""When the log tells of KV that float16 cannot hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtransfer.saturation import INTERVAL_S, SaturationLog
from tests.kvtransfer.rig import make_cache, make_rig
from tests.kvtransfer.test_receiver import feed, frames_of, open_write

torch.set_num_threads(1)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.msg for record in caplog.records if record.levelname == "WARNING"]  # type: ignore[misc]


def test_the_first_is_told_at_once_and_the_others_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    log = SaturationLog()
    for now, num_values in [(5.0, 0), (6.0, 3), (7.0, 4), (5.9 + INTERVAL_S, 5), (6.0 + INTERVAL_S, 0)]:
        log.add(num_values, now)
    assert [warning["saturated_values"] for warning in warnings_of(caplog)] == [3]
    log.add(1, 6.0 + INTERVAL_S)
    assert [warning["saturated_values"] for warning in warnings_of(caplog)] == [3, 10]
    assert "bfloat16 or float32" in warnings_of(caplog)[0]["remedy"]


def test_a_write_into_a_float16_cache_tells_of_what_it_saturates(caplog: pytest.LogCaptureFixture) -> None:
    rig = make_rig(cache=make_cache(dtype=torch.float16))
    # Block 5 of the source is the first of the sequence.
    rig.source.logical[5, 0, 0, 0, :2] = 70000.0
    feed(open_write(rig, rig.reserve(b"a", 20)), frames_of(rig, 20))
    assert rig.receiver.counters["saturated_values"] == 2 * rig.source.shape.head_dim
    assert [warning["event"] for warning in warnings_of(caplog)] == ["KV exceeds float16"]


def test_kv_that_fits_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    rig = make_rig(cache=make_cache(dtype=torch.float16))
    feed(open_write(rig, rig.reserve(b"a", 20)), frames_of(rig, 20))
    assert warnings_of(caplog) == []
