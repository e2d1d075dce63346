"""How long the certificate that a process uses is still good for: a metric, and a warning in the last week.

Owns no file: baton/live_tls.py says which certificate is in use. A process without TLS has nothing to tell.

    baton.tls.certificate.remaining  s  gauge  until the first certificate of tls_cert ends; below 0 after it
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from baton.logs import get_logger
from baton.tls import TlsFiles

DAY_S: Final = 86_400.0
WARNED_S: Final = 7 * DAY_S

log = get_logger(__name__)


class CertificateWatch:
    """Of one process."""

    def __init__(self, tls: TlsFiles, meter: Meter) -> None:
        self._path = tls.cert
        self._live = tls.live
        if (live := self._live) is not None:

            def observe(_options: CallbackOptions) -> Iterable[Observation]:
                return [Observation(live.remaining_s())]

            meter.create_observable_gauge(
                "baton.tls.certificate.remaining", [observe], "s", "Until the certificate in use ends"
            )

    async def run(self) -> None:
        """Looks at once and then daily, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(DAY_S)

    def look(self) -> None:
        """Warns where the end is near."""
        if self._live is None:
            return
        remaining_s = self._live.remaining_s()
        if remaining_s < WARNED_S:
            event = "the certificate ends soon" if remaining_s > 0 else "the certificate has ended"
            log.warning(event, tls_cert=self._path, days=round(remaining_s / DAY_S, 1))
