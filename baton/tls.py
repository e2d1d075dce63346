"""TLS of every link: which files it takes, and the credentials made of them.

Owns the reading and checking of PEM files. Knows no service and no port. Files are read when
credentials are made, once per process: new files take effect when the process restarts. What is
read goes to gRPC or to the HTTP port and is kept nowhere else.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol, Self

import grpc

from baton.errors import ConfigError
from baton.rpc import OpenChannel, open_channel

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

        Raises ConfigError, as all that read files do, if one cannot be read or is not what it should be.
        """
        if not self.ca:
            return None
        ca = read_certificates(self.ca, "tls_ca")
        return grpc.ssl_server_credentials(
            [self._read_pair()], root_certificates=ca, require_client_auth=True
        )

    def public_server_credentials(self) -> grpc.ServerCredentials | None:
        """For the clients' port: encrypted, and open to peers without a certificate. None: plain text."""
        return grpc.ssl_server_credentials([self._read_pair()]) if self.ca else None

    def public_context(self) -> ssl.SSLContext | None:
        """For the clients' HTTP port, as public_server_credentials() is for the other. None: plain text."""
        if not self.ca:
            return None
        self._read_pair()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(Path(self.cert).expanduser(), Path(self.key).expanduser(), password="")
        context.set_alpn_protocols(["http/1.1"])
        return context

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """For dialling ports inside the cluster. None: plain text."""
        if not self.ca:
            return None
        key, cert = self._read_pair()
        return grpc.ssl_channel_credentials(read_certificates(self.ca, "tls_ca"), key, cert)

    def opener(self) -> OpenChannel:
        """Opens channels with channel_credentials(), which are read now."""
        return partial(open_channel, credentials=self.channel_credentials(), server_name=self.server_name)

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
