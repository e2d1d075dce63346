"""The rule for the address that a worker announces: it must be one that others can dial.

Knows two settings by name, `host` and `advertise`, which both kinds of worker have. Opens no socket.
"""

from __future__ import annotations

from contextlib import suppress
from ipaddress import ip_address

from baton.errors import ConfigError


def check_advertise(host: str, advertise: str) -> None:
    """Raises ConfigError unless host and advertise together say where others reach this worker.

    host: address to listen on.
    advertise: host:port to announce instead of the bound one, or "".
    """
    if advertise:
        _check_address(advertise)
    elif _is_wildcard(host):
        raise ConfigError(
            f"host is {host!r}, every address of this machine, which nobody can dial; set advertise to the "
            "host:port at which routers and prefill workers reach this worker, or host to one address",
            field="host",
        )


def advertised(advertise: str, *, name: str, port: int) -> str:
    """advertise with {port} and {name} replaced by the bound port and the worker's name."""
    return advertise.replace("{port}", str(port)).replace("{name}", name)


def is_shareable(advertise: str) -> bool:
    """Whether several workers may be given it: each announces an address of its own."""
    return not advertise or "{port}" in advertise or "{name}" in advertise


def _check_address(advertise: str) -> None:
    # Any name and any port will do here: which they are is known once the port is bound.
    address = advertised(advertise, name="worker-0", port=1)
    host, _, port = address.rpartition(":")
    is_bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    is_port = port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535
    if not host or "{" in address or is_bare_ipv6 or not is_port or _is_wildcard(host):
        raise ConfigError(
            f"advertise is {advertise!r}; give host:port as others dial it, for example 10.0.0.7:50053, "
            "[fd00::7]:50053, or 10.0.0.7:{port} and {name}.pool:{port}, which stand for the bound port and "
            "the worker's name",
            field="advertise",
        )


def _is_wildcard(host: str) -> bool:
    bare = host.removeprefix("[").removesuffix("]")
    with suppress(ValueError):
        return ip_address(bare).is_unspecified
    # gRPC takes an empty host for every address too.
    return not bare
