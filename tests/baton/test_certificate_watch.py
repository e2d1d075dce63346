"""What is told of a certificate's end: a number at any time, a warning in the last week."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from baton import live_tls
from baton.certificate_watch import CertificateWatch
from baton.tls import TlsFiles
from tests.certificates import Authority


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_tls, "LOOK_EVERY_S", 0.0)


class Told:
    """A watch, and what a collector and a reader of the log get of it."""

    def __init__(self, tls: TlsFiles, caplog: pytest.LogCaptureFixture) -> None:
        self._reader = InMemoryMetricReader()
        self._caplog = caplog
        meter = MeterProvider(metric_readers=[self._reader]).get_meter("baton")
        self._watch = CertificateWatch(tls, meter)

    def metrics(self) -> dict[tuple[str, str], float]:
        data: Any = self._reader.get_metrics_data()
        resources = data.resource_metrics if data else []
        found = [m for r in resources for s in r.scope_metrics for m in s.metrics]
        return {(m.name, m.unit): p.value for m in found for p in m.data.data_points}

    def warnings(self) -> list[str]:
        self._caplog.clear()
        self._watch.look()
        return [r.getMessage() for r in self._caplog.records if r.levelname == "WARNING"]


def ending_in(authority: Authority, **left: float) -> TlsFiles:
    return authority.issue("127.0.0.1", not_after=datetime.now(UTC) + timedelta(**left))


def test_the_last_week_is_warned_of_until_the_certificate_is_renewed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    tls = ending_in(authority, days=6, hours=12)
    told = Told(tls, caplog)
    (remaining,) = told.metrics().items()
    assert remaining[0] == ("baton.tls.certificate.remaining", "s")
    assert remaining[1] == pytest.approx(6.5 * 86_400, abs=60)
    (warning,) = told.warnings()
    assert "the certificate ends soon" in warning
    assert "6.5" in warning
    assert tls.cert in warning
    assert len(told.warnings()) == 1

    renewed = ending_in(authority, days=90)
    shutil.copy(renewed.cert, tls.cert)
    # Without its key it is not in use.
    assert list(told.metrics().values()) == [pytest.approx(6.5 * 86_400, abs=60)]
    shutil.copy(renewed.key, tls.key)
    assert told.warnings() == []
    assert list(told.metrics().values()) == [pytest.approx(90 * 86_400, abs=60)]


def test_an_end_that_is_past_is_told_as_that(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = Told(ending_in(Authority(tmp_path), hours=-36), caplog)
    assert list(told.metrics().values()) == [pytest.approx(-1.5 * 86_400, abs=60)]
    (warning,) = told.warnings()
    assert "the certificate has ended" in warning


@pytest.mark.parametrize(("left", "num_warnings"), [({"days": 7, "minutes": 5}, 0), ({"days": 6.99}, 1)])
def test_seven_days_are_the_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, left: dict[str, float], num_warnings: int
) -> None:
    assert len(Told(ending_in(Authority(tmp_path), **left), caplog).warnings()) == num_warnings


def test_without_tls_there_is_nothing_to_tell(caplog: pytest.LogCaptureFixture) -> None:
    told = Told(TlsFiles(), caplog)
    assert told.metrics() == {}
    assert told.warnings() == []
