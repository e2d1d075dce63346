"""The files of TLS as they are now: certificates are renewed while a process runs.

Owns when files are looked at, and that a set which cannot be used changes nothing: whoever renews writes
one file after the other. New connections use what is new; those that stand go on. gRPC asks on threads of
its own.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import grpc

from baton.errors import ConfigError
from baton.logs import get_logger
from baton.tls import Pem, TlsFiles

# Renewals come days before the end; a handshake shall not wait for the disk each time.
LOOK_EVERY_S: Final = 5.0

log = get_logger(__name__)


class LiveTls:
    """One process's files. Raises ConfigError, as TlsFiles does, if they cannot be used at first.

    ca: path of who signs peers; "" where peers show nothing.
    setting: name of the setting that ca is, for errors.
    """

    def __init__(
        self,
        files: TlsFiles,
        *,
        ca: str,
        setting: str = "tls_ca",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self._ca = ca
        self._setting = setting
        self._clock = clock
        self._lock = threading.Lock()
        self._seen = self._stamps()
        self._looked_at = clock()
        self._pem = files.read(ca, self._setting)
        self._context: tuple[Pem, ssl.SSLContext] | None = None

    def current(self) -> Pem:
        """The last set that could be used."""
        with self._lock:
            now = self._clock()
            if now - self._looked_at >= LOOK_EVERY_S:
                self._looked_at = now
                self._look()
            return self._pem

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a port; peers need a certificate if there is a ca."""
        shown: list[Pem] = [self.current()]

        def changed() -> grpc.ServerCertificateConfiguration | None:
            pem = self.current()
            if pem is shown[0]:
                return None
            shown[0] = pem
            return pem.server_configuration()

        return grpc.dynamic_ssl_server_credentials(
            shown[0].server_configuration(),
            # None stands for "as before", which the stubs do not know.
            changed,  # type: ignore[arg-type]
            require_client_authentication=bool(self._ca),
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For one channel that is dialled now."""
        pem = self.current()
        return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)

    def server_context(self) -> ssl.SSLContext:
        """For a listener of asyncio: each handshake is handed the context of the files as they are then."""
        context = self._made_context()

        def hand_over(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self._made_context()

        context.sni_callback = hand_over
        return context

    def _made_context(self) -> ssl.SSLContext:
        pem = self.current()
        if self._context is None or self._context[0] is not pem:
            try:
                self._context = (pem, self._files.context(self._ca))
            except (OSError, ssl.SSLError):
                # The files have changed since they were looked at; the next look tells.
                if self._context is None:
                    raise
        return self._context[1]

    def _look(self) -> None:
        try:
            seen = self._stamps()
            if seen == self._seen:
                return
            # Told once: what is half written is written on, and then looked at again.
            self._seen = seen
            pem = self._files.read(self._ca, self._setting)
        except (ConfigError, OSError) as error:
            log.warning("changed TLS files are not used", reason=str(error))
            return
        if pem != self._pem:
            self._pem = pem
            log.info("TLS files have changed", cert=self._files.cert)

    def _stamps(self) -> list[tuple[int, int, int]]:
        """What tells that a file is another one; a renewed one may have the old one's time or size."""
        paths = (self._files.cert, self._files.key, self._ca)
        stats = [
            Path(path).expanduser().stat() for path in paths if path and Path(path).expanduser().exists()
        ]
        return [(stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats]
