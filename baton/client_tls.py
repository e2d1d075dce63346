"""TLS as a client of routers has it: whom it trusts, and what it shows.

Owns what becomes of PEM given as bytes, which is what a store of secrets hands out. baton/tls.py is the
TLS of the cluster's own processes, which read files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import grpc
import grpc.aio

from baton.errors import ConfigError
from baton.rpc import OpenChannel, open_router_channel
from baton.tls import check_certificates, read_certificates


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """How a client checks routers, and what it shows them.

    ca: PEM, the authorities to trust; None for the public ones that gRPC brings, or those in the file that
        GRPC_DEFAULT_SSL_ROOTS_FILE_PATH names.
    server_name: what the router's certificate must name instead of the dialled host, or "".
    cert: PEM, a certificate to show to routers, or to a proxy, that ask for one.
    key: PEM, its private key, not encrypted.

    Raises ConfigError, naming the field, for what is not PEM, and for only one of cert and key.

    >>> TlsConfig(server_name="router.internal")
    TlsConfig(server_name='router.internal')
    """

    ca: bytes | None = field(default=None, repr=False)
    server_name: str = ""
    cert: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("ca", "cert", "key"):
            if not isinstance(getattr(self, name), bytes | None):
                raise ConfigError(f"{name} of tls must be bytes, in PEM form", field=f"tls.{name}")
        for name in ("ca", "cert"):
            if (pem := getattr(self, name)) is not None:
                check_certificates(pem, f"tls.{name}", f"{name} of tls")
        if (self.cert is None) != (self.key is None):
            missing = "cert" if self.cert is None else "key"
            raise ConfigError(
                f"{missing} of tls is not set; a certificate and its key go together", field=f"tls.{missing}"
            )
        if self.key is not None and b"PRIVATE KEY-----" not in self.key:
            raise ConfigError("key of tls holds no private key in PEM form", field="tls.key")

    @classmethod
    def trusting(cls, path: str | os.PathLike[str]) -> Self:
        """Trusts the authorities in a PEM file; raises ConfigError, naming tls_ca, if it cannot be used."""
        return cls(ca=read_certificates(os.fspath(path), "tls_ca"))


def opener(tls: TlsConfig | None, interceptors: Sequence[grpc.aio.ClientInterceptor] = ()) -> OpenChannel:
    """Opens channels to routers; in plain text without tls. interceptors: gRPC's, outermost first."""
    if tls is None:
        return partial(open_router_channel, interceptors=tuple(interceptors))
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
    return partial(
        open_router_channel,
        credentials=credentials,
        server_name=tls.server_name,
        interceptors=tuple(interceptors),
    )
