"""How `baton bench` reaches a cluster: by gRPC through the SDK, or by HTTP."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from baton.api_keys import ApiKey, refuse_plain_text
from baton.bench.grpc_door import ClusterTarget
from baton.bench.http_connection import Endpoint
from baton.bench.http_door import HttpTarget
from baton.bench.target import Target
from baton.cli.bench_options import parsed
from baton.cli.options import CONNECT_S
from baton.client import AsyncClient
from baton.errors import ConfigError
from baton.retry import Retry


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """name: "grpc" or "http". where: host:port of the one, URL of the other. api_key: who is calling."""

    name: str
    where: str
    tls_ca: Path | None
    api_key: str | None = field(repr=False)
    insecure_key: bool


@asynccontextmanager
async def open_door(door: Door) -> AsyncIterator[tuple[Target, str]]:
    """What requests are sent to, and the model that answers; raises Unavailable if nothing does."""
    if door.name == "grpc":
        async with await AsyncClient.connect(
            door.where,
            timeout_s=CONNECT_S,
            tls_ca=door.tls_ca,
            api_key=door.api_key,
            insecure_key=door.insecure_key,
            # A refusal is a result, and tries hide latencies.
            retry=Retry(max_attempts=1),
        ) as client:
            models = await client.list_models()
            yield ClusterTarget(client), models[0].name if models else ""
        return
    target = _http_target(door)
    try:
        yield target, await target.find_model()
    finally:
        target.close()


def _http_target(door: Door) -> HttpTarget:
    endpoint = parsed(Endpoint.parse, door.where, "--url")
    if door.api_key is not None:
        # The same characters as on the other door.
        ApiKey(door.api_key)
        if not endpoint.is_tls and not door.insecure_key:
            refuse_plain_text([endpoint.authority])
    return HttpTarget(
        endpoint, context=_context(door.tls_ca) if endpoint.is_tls else None, api_key=door.api_key
    )


def _context(tls_ca: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=None if tls_ca is None else str(tls_ca))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"tls_ca is {str(tls_ca)!r}, which cannot be used: {error}", field="tls_ca"
        ) from None
