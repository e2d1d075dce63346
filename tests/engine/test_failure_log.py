"""What the log says of requests that failed because of the model."""

from __future__ import annotations

import pytest

from baton.errors import Cancelled, NonFiniteLogits
from engine.failure_log import tell_nonfinite


def test_only_logits_that_are_not_finite_are_told_with_request_and_layer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tell_nonfinite(Cancelled("the caller gave up"), "r1")
    tell_nonfinite(NonFiniteLogits("NaN; they first appear in layer 3"), "r2")
    (record,) = caplog.records
    assert isinstance(record.msg, dict)
    assert record.levelname == "WARNING"
    assert (record.msg["request_id"], record.msg["reason"]) == ("r2", "NaN; they first appear in layer 3")
