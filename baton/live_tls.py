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
LOOK_EVERY_S: Final = 1.0

log = get_logger(__name__)


class LiveTls:
    """One process's files. Raises ConfigError, as TlsFiles does, if they cannot be used at first.

    clock: seconds from any moment on. wall: seconds since 1970.
    """

    def __init__(
        self,
        files: TlsFiles,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._files = files
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self._seen = self._stamps()
        self._looked_at = clock()
        self._pem = files.read()
        self._context: tuple[Pem, ssl.SSLContext] | None = None

    def current(self) -> Pem:
        """The last set that could be used."""
        with self._lock:
            now = self._clock()
            if now - self._looked_at >= LOOK_EVERY_S:
                self._looked_at = now
                self._look()
            return self._pem

    def remaining_s(self) -> float:
        """How long the certificate in use, or the first of its authorities' beside it, is still good for."""
        return self.current().ends_at - self._wall()

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a port inside the cluster: peers need a certificate."""
        return self._credentials(Pem.private_configuration, is_mutual=True)

    def public_server_credentials(self) -> grpc.ServerCredentials:
        """For the clients' port."""
        return self._credentials(Pem.public_configuration, is_mutual=bool(self._files.client_ca))

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For one channel that is dialled now."""
        pem = self.current()
        return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)

    def public_context(self) -> ssl.SSLContext:
        """For a listener of asyncio: each handshake is handed the context of the files as they are then."""
        context = self._made_context()

        def hand_over(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self._made_context()

        context.sni_callback = hand_over
        return context

    def _credentials(
        self, configuration: Callable[[Pem], grpc.ServerCertificateConfiguration], *, is_mutual: bool
    ) -> grpc.ServerCredentials:
        shown = self.current()

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            before, shown = shown, self.current()
            return None if shown is before else configuration(shown)

        return grpc.dynamic_ssl_server_credentials(
            configuration(shown),
            # None stands for "as before", which the stubs do not know.
            changed,  # type: ignore[arg-type]
            require_client_authentication=is_mutual,
        )

    def _made_context(self) -> ssl.SSLContext:
        pem = self.current()
        if self._context is None or self._context[0] is not pem:
            try:
                self._context = (pem, self._files.make_public_context())
            except OSError:
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
            pem = self._files.read()
            if self._stamps() != seen:
                # Some of it may be from before, some from after.
                self._seen = []
                return
        except (ConfigError, OSError) as error:
            log.warning("changed TLS files are not used", reason=str(error))
            return
        if pem != self._pem:
            self._pem = pem
            log.info("TLS files have changed", cert=self._files.cert)

    def _stamps(self) -> list[tuple[int, int, int]]:
        """What tells that a file is another one; a renewed one may have the old one's time or size."""
        files = self._files
        paths = [
            Path(path).expanduser() for path in (files.cert, files.key, files.ca, files.client_ca) if path
        ]
        stats = [path.stat() for path in paths if path.exists()]
        return [(stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats]
