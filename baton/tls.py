"""TLS of every link: which files it takes, and the credentials made of them.

Owns the reading and checking of PEM files. Knows no service and no port. Files that change are followed
by baton/live_tls.py. What is read goes to gRPC or to the HTTP port and is kept nowhere else.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, Self

import grpc
import grpc.aio

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
    """Contents of a set of files that belong together. ca: who signs peers, or None where none are asked."""

    key: bytes
    cert: bytes
    ca: bytes | None

    def server_configuration(self) -> grpc.ServerCertificateConfiguration:
        """As gRPC's servers take it."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], root_certificates=self.ca)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The PEM files of one process; without any, its links are plain text. A field is named tls_* in errors.

    cert: its certificate, followed by those of intermediate authorities.
    key: the certificate's private key, not encrypted.
    ca: certificates of the authorities that sign peers.
    server_name: the name that a dialled peer's certificate must carry instead of the dialled host, or "".

    Raises ConfigError if only some are given.
    """

    cert: str = ""
    key: str = ""
    ca: str = ""
    server_name: str = ""

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("cert", "key", "ca")}
        missing = [f"tls_{name}" for name, path in given.items() if not path]
        if missing and (len(missing) < len(given) or self.server_name):
            verb = "is" if len(missing) == 1 else "are"
            raise ConfigError(
                f"TLS needs tls_cert, tls_key and tls_ca, but {' and '.join(missing)} {verb} not set; "
                "set all three, or none and no tls_server_name for plain text",
                field=missing[0],
            )

    @classmethod
    def of(cls, settings: TlsSettings) -> Self:
        """The files that a config names; raises ConfigError if it names only some."""
        return cls(
            cert=settings.tls_cert,
            key=settings.tls_key,
            ca=settings.tls_ca,
            server_name=settings.tls_server_name,
        )

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """For a port inside the cluster: only peers whose certificate `ca` signed get in. None: plain text.

        Files that change later are followed (baton.live_tls). Raises ConfigError, as all that read files do,
        if one cannot be read or is not what it should be.
        """
        return self._live(self.ca).server_credentials() if self.ca else None

    def public_server_credentials(self, client_ca: str = "") -> grpc.ServerCredentials | None:
        """For the clients' port. None: plain text.

        client_ca: who signs clients' certificates, or "" if they need none.
        """
        return self._live(client_ca, "client_ca").server_credentials() if self.ca else None

    def public_context(self, client_ca: str = "") -> ssl.SSLContext | None:
        """For the clients' HTTP port, as public_server_credentials() is for the other."""
        return self._live(client_ca, "client_ca").server_context() if self.ca else None

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """For dialling ports inside the cluster, with the files as they are now. None: plain text."""
        return self._live(self.ca).channel_credentials() if self.ca else None

    def opener(self) -> OpenChannel:
        """Opens channels to ports of the cluster, each with the files as they are then."""
        if not self.ca:
            return open_channel
        live = self._live(self.ca)

        def opened(address: str) -> grpc.aio.Channel:
            return open_channel(address, credentials=live.channel_credentials(), server_name=self.server_name)

        return opened

    def read(self, ca: str, setting: str) -> Pem:
        """The files' contents, checked to belong together. ca: path of who signs peers, or "".

        setting: the name of ca in errors.
        """
        key, cert = self._read_pair()
        return Pem(key=key, cert=cert, ca=read_certificates(ca, setting) if ca else None)

    def context(self, ca: str) -> ssl.SSLContext:
        """For a server of asyncio that asks for certificates that ca signed; "" asks for none."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(Path(self.cert).expanduser(), Path(self.key).expanduser(), password="")
        context.set_alpn_protocols(["http/1.1"])
        if ca:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(Path(ca).expanduser())
        return context

    def _live(self, ca: str, setting: str = "tls_ca") -> LiveTls:
        # The SDK reads certificates as well, and has no log.
        from baton.live_tls import LiveTls  # noqa: PLC0415

        return LiveTls(self, ca=ca, setting=setting)

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
