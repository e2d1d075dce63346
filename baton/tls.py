"""TLS of every link: which files it takes, and the credentials made of them.

Owns the reading and checking of PEM files. Knows no service and no port. Files that change are followed
by baton/live_tls.py. What is read goes to gRPC or to the HTTP port and is kept nowhere else.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, Self

import grpc
import grpc.aio

from baton.certificate_end import ends_at
from baton.errors import ConfigError
from baton.rpc import OpenChannel, open_channel

if TYPE_CHECKING:
    from baton.live_tls import LiveTls

TLS_SETTINGS: Final = ("tls_cert", "tls_key", "tls_ca", "tls_server_name")


class TlsSettings(Protocol):
    """What each config calls its settings of TLS; "" where one is not set."""

    @property
    def tls_cert(self) -> str:
        """Path of this process's certificate."""

    @property
    def tls_key(self) -> str:
        """Path of its private key."""

    @property
    def tls_ca(self) -> str:
        """Path of the certificates that sign peers."""

    @property
    def tls_server_name(self) -> str:
        """Name in the certificates of those that are dialled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pem:
    """Contents of a set of files that belong together.

    ca, client_ca: who signs peers, and who signs clients; client_ca is None where clients show nothing.
    ends_at: when the first of the certificates in cert ends, in seconds since 1970.
    """

    key: bytes
    cert: bytes
    ca: bytes
    client_ca: bytes | None
    ends_at: float

    def private_configuration(self) -> grpc.ServerCertificateConfiguration:
        """For gRPC's servers inside the cluster."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], self.ca)

    def public_configuration(self) -> grpc.ServerCertificateConfiguration:
        """For the clients' gRPC server."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], self.client_ca)


# Not slotted: what it has read is kept in it, so that all servers and diallers of a process share that.
@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """The PEM files of one process; without any, its links are plain text. A field is named tls_* in errors.

    cert: its certificate, followed by those of intermediate authorities.
    key: the certificate's private key, not encrypted.
    ca: certificates of the authorities that sign peers.
    server_name: the name that a dialled peer's certificate must carry instead of the dialled host, or "".
    client_ca: certificates of the authorities that sign clients, or "" if clients need no certificate.

    Files that change are followed. Raises ConfigError if only some are given; what reads files does so if
    one cannot be read or is not what it should be.
    """

    cert: str = ""
    key: str = ""
    ca: str = ""
    server_name: str = ""
    client_ca: str = ""

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("cert", "key", "ca")}
        missing = [f"tls_{name}" for name, path in given.items() if not path]
        if missing and (len(missing) < len(given) or self.server_name or self.client_ca):
            verb = "is" if len(missing) == 1 else "are"
            raise ConfigError(
                f"TLS needs tls_cert, tls_key and tls_ca, but {' and '.join(missing)} {verb} not set; "
                "set all three, or none and neither tls_server_name nor client_ca for plain text",
                field=missing[0],
            )

    @classmethod
    def of(cls, settings: TlsSettings, client_ca: str = "") -> Self:
        """The files that a config names; raises ConfigError if it names only some."""
        return cls(
            cert=settings.tls_cert,
            key=settings.tls_key,
            ca=settings.tls_ca,
            server_name=settings.tls_server_name,
            client_ca=client_ca,
        )

    @cached_property
    def live(self) -> LiveTls | None:
        """What they hold, now and later; None for plain text."""
        # The SDK reads certificates as well, and has no log.
        from baton.live_tls import LiveTls  # noqa: PLC0415

        return LiveTls(self) if self.ca else None

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """For a port inside the cluster; who comes needs a certificate that `ca` signed. None: plain text."""
        return self.live.server_credentials() if self.live else None

    def public_server_credentials(self) -> grpc.ServerCredentials | None:
        """For the clients' gRPC port. None: plain text."""
        return self.live.public_server_credentials() if self.live else None

    def public_context(self) -> ssl.SSLContext | None:
        """For the clients' HTTP port. None: plain text."""
        return self.live.public_context() if self.live else None

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """For dialling ports inside the cluster, with the files as they are now. None: plain text."""
        return self.live.channel_credentials() if self.live else None

    def opener(self) -> OpenChannel:
        """Opens channels to ports of the cluster, each with the files as they are then."""
        if self.live is None:
            return open_channel

        def opened(address: str) -> grpc.aio.Channel:
            return open_channel(address, credentials=self.channel_credentials(), server_name=self.server_name)

        return opened

    def read(self) -> Pem:
        """The files' contents, checked to belong together."""
        key, cert = self._read_pair()
        return Pem(
            key=key,
            cert=cert,
            ca=read_certificates(self.ca, "tls_ca"),
            client_ca=read_certificates(self.client_ca, "client_ca") if self.client_ca else None,
            ends_at=ends_at(cert),
        )

    def make_public_context(self) -> ssl.SSLContext:
        """For a server of asyncio, of the files as they are now; raises OSError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(Path(self.cert).expanduser(), Path(self.key).expanduser(), password="")
        context.set_alpn_protocols(["http/1.1"])
        if self.client_ca:
            context.verify_mode = ssl.CERT_REQUIRED
            # A session that is resumed shows no certificate: authorities that were taken out would count on.
            # Before TLS 1.3 the library offers no way to refuse that.
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.num_tickets = 0
            context.load_verify_locations(Path(self.client_ca).expanduser())
        return context

    def _read_pair(self) -> tuple[bytes, bytes]:
        """Private key and certificates, checked to belong together."""
        cert = read_certificates(self.cert, "tls_cert")
        key = _read(self.key, "tls_key")
        try:
            # The empty password keeps OpenSSL from asking at the terminal.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                Path(self.cert).expanduser(), Path(self.key).expanduser(), password=""
            )
        except (ssl.SSLError, ValueError):
            raise ConfigError(
                f"tls_key is {self.key!r}, which holds no private key in PEM form without a password that "
                f"belongs to the first certificate in {self.cert!r} (tls_cert)",
                field="tls_key",
            ) from None
        return key, cert


def read_certificates(path: str, field: str) -> bytes:
    """The file's content; raises ConfigError, naming the field, unless it is certificates in PEM form."""
    pem = _read(path, field)
    check_certificates(pem, field, f"{field} is {path!r}, which")
    return pem


def check_certificates(pem: bytes, field: str, what: str) -> None:
    """Raises ConfigError, naming the field, unless there is a certificate. what: the error's first words."""
    try:
        # Only what stands between the markers counts, and that is ASCII; comments need not be.
        text = pem.decode("ascii", "ignore")
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError):
        raise ConfigError(f"{what} holds no certificate in PEM form", field=field) from None


def _read(path: str, field: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{field} is {path!r}, which cannot be read: {error.strerror}; "
            "name a PEM file that this user may read",
            field=field,
        ) from None
