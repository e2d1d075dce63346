"""What every gRPC endpoint of Baton shares: options, channels, and errors on the wire.

Owns the one table of channel and server options, the trailing metadata that
carries a BatonError, and the client-side translation of gRPC's errors. It knows
no service and no message. The server side is baton/rpc_server.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final
from urllib.parse import quote, unquote

import grpc
import grpc.aio

from baton.errors import (
    BY_CODE,
    BatonError,
    Cancelled,
    DeadlineExceeded,
    IncompatiblePeer,
    InternalError,
    InvalidRequest,
    Overloaded,
    Unauthenticated,
    Unavailable,
)

MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
KEEPALIVE_INTERVAL_MS: Final = 30_000
# KV may be under way on a link so slow that a ping waits behind it; heartbeats end a session much sooner.
PING_TIMEOUT_MS: Final = 60_000
# Nothing but pings tells a client that its router is stopped or cut off: it finds out after both together.
ROUTER_PING_INTERVAL_MS: Final = 1_000
ROUTER_PING_TIMEOUT_MS: Final = 1_500

# Both ends stand in one table because they must fit: a server whose default of one ping per 300 s
# stayed in force would close, with "too_many_pings", every connection on which a long prefill is silent.
# (option, at the client, at the server); None leaves gRPC's default.
_OPTIONS: Final[tuple[tuple[str, int | None, int | None], ...]] = (
    ("grpc.keepalive_time_ms", KEEPALIVE_INTERVAL_MS, KEEPALIVE_INTERVAL_MS),
    # gRPC (1.85) never starts the timer of keepalive_timeout_ms; this is what ends a connection.
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS, PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1, 1),
    ("grpc.http2.max_pings_without_data", 0, 0),
    # Below every client's interval by a margin for jitter; the SDK of another language may ping faster.
    ("grpc.http2.min_ping_interval_without_data_ms", None, 500),
    ("grpc.http2.max_ping_strikes", None, 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES),
    # Whoever connects and says nothing holds a descriptor for this long; gRPC's own patience is two minutes.
    ("grpc.server_handshake_timeout_ms", None, 10_000),
    # Two processes on one port would each get half of the connections; a taken port must be an error.
    ("grpc.so_reuseport", None, 0),
    # A worker that restarts is back in a second; gRPC's own pauses grow to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200, None),
    ("grpc.min_reconnect_backoff_ms", 2_000, None),
    ("grpc.max_reconnect_backoff_ms", 2_000, None),
    # Channels to one address would share connections and their back-off, and a worker that came back at
    # its old address would be met with the old one's state.
    ("grpc.use_local_subchannel_pool", 1, None),
    # A proxy variable meant for browsers must not divert traffic inside a cluster.
    ("grpc.enable_http_proxy", 0, None),
)
CHANNEL_OPTIONS: Final = tuple((name, client) for name, client, _ in _OPTIONS if client is not None)
SERVER_OPTIONS: Final = tuple((name, server) for name, _, server in _OPTIONS if server is not None)
_OF_ROUTERS: Final[Mapping[str, int | str]] = MappingProxyType(
    {
        "grpc.keepalive_time_ms": ROUTER_PING_INTERVAL_MS,
        "grpc.http2.ping_timeout_ms": ROUTER_PING_TIMEOUT_MS,
        # Behind one name, such as a headless Service's, may be many routers; gRPC's default is to use one.
        "grpc.service_config": '{"loadBalancingConfig": [{"round_robin": {}}]}',
    }
)
ROUTER_CHANNEL_OPTIONS: Final[tuple[tuple[str, int | str], ...]] = tuple(
    {**dict(CHANNEL_OPTIONS), **_OF_ROUTERS}.items()
)

OpenChannel = Callable[[str], grpc.aio.Channel]

CODE_KEY: Final = "baton-error-code"
FIELD_KEY: Final = "baton-error-field"
RETRY_KEY: Final = "retry-after-ms"

# A status message is percent-encoded into a header; gRPC drops a call whose headers pass 8 KiB.
_MAX_DETAIL_BYTES: Final = 2_000
_MAX_FIELD_CHARS: Final = 200
_MAX_RETRY_MS: Final = 3_600_000

# For peers that send no baton-error-code: another gRPC server, a proxy, or gRPC itself.
_BY_STATUS: Final[Mapping[grpc.StatusCode, type[BatonError]]] = MappingProxyType(
    {
        grpc.StatusCode.ABORTED: Unavailable,
        grpc.StatusCode.ALREADY_EXISTS: InvalidRequest,
        grpc.StatusCode.CANCELLED: Cancelled,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
        grpc.StatusCode.FAILED_PRECONDITION: IncompatiblePeer,
        grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
        grpc.StatusCode.NOT_FOUND: InvalidRequest,
        grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
        grpc.StatusCode.PERMISSION_DENIED: InvalidRequest,
        grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
        grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
        grpc.StatusCode.UNAVAILABLE: Unavailable,
        grpc.StatusCode.UNIMPLEMENTED: IncompatiblePeer,
    }
)

# In the words of each way to use several addresses.
_NOBODY_THERE: Final = "(failed to connect to all addresses|connections to all backends failing)"
# What gRPC says when two ends do not agree on TLS, the setting at fault, and what to say of it.
# A server that refuses a certificate hangs up; its own log has the reason, the client cannot know it.
_TLS_FAILURES: Final[tuple[tuple[str, str, str], ...]] = (
    ("CERTIFICATE_VERIFY_FAILED", "tls_ca", "its certificate does not pass the check against tls_ca"),
    (
        "Hostname Verification",
        "tls_server_name",
        "its certificate carries another name than the one dialled; dial that, or set tls_server_name to it",
    ),
    (
        "WRONG_VERSION_NUMBER",
        "tls_cert",
        "it speaks plain text, this side TLS; set TLS at both ends or at none",
    ),
    (
        f"{_NOBODY_THERE}; last error: UNAVAILABLE: .*Socket closed",
        "tls_cert",
        "the connection was closed before a word was said; a port with TLS does so to a peer without it, or "
        "without a certificate that it trusts",
    ),
)


def open_channel(
    target: str,
    *,
    credentials: grpc.ChannelCredentials | None = None,
    server_name: str = "",
    interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
    options: Sequence[tuple[str, int | str]] = CHANNEL_OPTIONS,
) -> grpc.aio.Channel:
    """A channel with Baton's options; it connects on first use.

    Args:
        target: host:port, or any gRPC name such as "dns:///baton-router:50051".
        credentials: for TLS; plain text without. baton/tls.py makes them.
        server_name: the name that the server's certificate must carry; "" for the target's host.
        interceptors: passed to gRPC as they are.
        options: CHANNEL_OPTIONS or ROUTER_CHANNEL_OPTIONS.
    """
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options, interceptors=list(interceptors))
    named: list[tuple[str, int | str]] = list(options)
    if server_name:
        named.append(("grpc.ssl_target_name_override", server_name))
    return grpc.aio.secure_channel(target, credentials, options=named, interceptors=list(interceptors))


def open_router_channel(
    target: str,
    *,
    credentials: grpc.ChannelCredentials | None = None,
    server_name: str = "",
    interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
) -> grpc.aio.Channel:
    """A client's channel to a router: it breaks within 2.5 s of the last word from there.

    A router that works but has nothing to say answers pings. A name with several addresses spreads the
    calls over them. Arguments are open_channel()'s.
    """
    return open_channel(
        target,
        credentials=credentials,
        server_name=server_name,
        interceptors=interceptors,
        options=ROUTER_CHANNEL_OPTIONS,
    )


def to_status(error: BatonError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """The gRPC status, message and trailing metadata of an error."""
    metadata = [(CODE_KEY, error.code)]
    if error.field:
        metadata.append((FIELD_KEY, quote(error.field[:_MAX_FIELD_CHARS], safe="[]().")))
    if error.retry_after_s is not None:
        metadata.append((RETRY_KEY, str(max(1, round(error.retry_after_s * 1000)))))
    details = error.message.encode("utf-8", "replace")[:_MAX_DETAIL_BYTES].decode("utf-8", "ignore")
    return grpc.StatusCode[error.status], details, tuple(metadata)


def translate(error: grpc.aio.AioRpcError) -> BatonError:
    """The BatonError that a failed call stands for.

    A Baton server says which in its trailing metadata; otherwise the status code decides.
    """
    metadata = _text_metadata(error)
    details, field = error.details() or f"the call failed with {error.code().name}", ""
    if CODE_KEY not in metadata:
        details, field = _in_our_words(error.code(), details)
    return _class_of(error, metadata)(
        details, field=unquote(metadata.get(FIELD_KEY, field)), retry_after_s=_retry_after_s(metadata)
    )


def is_from_baton(error: grpc.aio.AioRpcError) -> bool:
    """Whether a Baton server said so itself; otherwise gRPC did, because the server is gone."""
    return CODE_KEY in _text_metadata(error)


def _in_our_words(code: grpc.StatusCode, details: str) -> tuple[str, str]:
    """What gRPC says about its streams and handshakes, as it looks from above, and the setting at fault."""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "the deadline passed before the answer was complete", ""
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return "nobody serves this call at that address; is it a router's public port, of this version?", ""
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "Concurrent RPC limit" in details:
        return "the server has as many calls open as it takes; try again later", ""
    for pattern, field, words in _TLS_FAILURES:
        if re.search(pattern, details):
            return f"{words} ({details})", field
    if code is grpc.StatusCode.UNAVAILABLE and re.match(_NOBODY_THERE, details):
        return f"nothing answers at its address; is it running? ({details})", ""
    return details, ""


def _class_of(error: grpc.aio.AioRpcError, metadata: Mapping[str, str]) -> type[BatonError]:
    named = BY_CODE.get(metadata.get(CODE_KEY, ""))
    if named is not None:
        return named
    # gRPC uses one code for a full queue and for a message over the limit; the second never gets better.
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in (error.details() or ""):
        return InvalidRequest
    return _BY_STATUS.get(error.code(), InternalError)


def _text_metadata(error: grpc.aio.AioRpcError) -> dict[str, str]:
    return {key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)}


def _retry_after_s(metadata: Mapping[str, str]) -> float | None:
    text = metadata.get(RETRY_KEY, "")
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        return None
    return min(int(text), _MAX_RETRY_MS) / 1000
