"""What a client needs to know to connect, from its arguments and, where they say nothing, the environment.

Owns the rule that an API key crosses no network in plain text by mistake. Nothing is dialled here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from baton.api_keys import ApiKey, KeySource, refuse_plain_text
from baton.client_tls import TlsConfig
from baton.cluster.defaults import DEFAULT_ADDRESS
from baton.errors import ConfigError
from baton.targets import check_target, is_local

ADDRESS_VARIABLE = "BATON_ADDRESS"
KEY_VARIABLE = "BATON_API_KEY"
CA_VARIABLE = "BATON_TLS_CA"
SERVER_NAME_VARIABLE = "BATON_TLS_SERVER_NAME"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Where to, over what, and as whom.

    targets: addresses of routers of one cluster, at least one.
    tls: None for plain text.
    api_key: who is calling; None says nothing.
    """

    targets: tuple[str, ...]
    tls: TlsConfig | None
    api_key: KeySource | None

    @classmethod
    def resolve(
        cls,
        target: str | Sequence[str] | None,
        *,
        tls: bool | TlsConfig | None,
        tls_ca: str | os.PathLike[str] | None,
        api_key: str | Callable[[], str] | None,
        insecure_key: bool,
        environ: Mapping[str, str],
    ) -> Self:
        """The connection that the arguments of AsyncClient.connect() describe; raises ConfigError.

        environ: BATON_ADDRESS, BATON_API_KEY and BATON_TLS_CA stand for target, api_key and tls_ca where
            those are None, and BATON_TLS_SERVER_NAME for the server_name of a TlsConfig; an empty one says
            nothing.
        """
        if target is None:
            target = environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS
        targets = tuple(map(check_target, [target] if isinstance(target, str) else target))
        if not targets:
            raise ConfigError("target is empty; name at least one router", field="target")
        if api_key is None:
            api_key = environ.get(KEY_VARIABLE) or None
        key = ApiKey(api_key) if isinstance(api_key, str) else api_key
        if tls_ca is not None and (tls is False or isinstance(tls, TlsConfig)):
            raise ConfigError("tls_ca and tls exclude each other; give one of them", field="tls_ca")
        if tls_ca is None and not isinstance(tls, TlsConfig) and tls is not False:
            tls_ca = environ.get(CA_VARIABLE) or None
        if tls is None:
            # One key for all of them: as soon as one lies elsewhere, all are dialled with TLS.
            tls = key is not None and not insecure_key and not all(map(is_local, targets))
        chosen = _tls(tls, tls_ca, environ.get(SERVER_NAME_VARIABLE, ""))
        if key is not None and chosen is None and not insecure_key:
            refuse_plain_text(targets)
        return cls(targets=targets, tls=chosen, api_key=key)


def _tls(tls: bool | TlsConfig, tls_ca: str | os.PathLike[str] | None, server_name: str) -> TlsConfig | None:
    if isinstance(tls, TlsConfig):
        return tls
    if not isinstance(tls, bool):
        raise ConfigError(f"tls is {tls!r}; it must be True, False or a baton.TlsConfig", field="tls")
    if tls_ca is not None:
        return replace(TlsConfig.trusting(tls_ca), server_name=server_name)
    return TlsConfig(server_name=server_name) if tls else None
