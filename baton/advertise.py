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


def _check_address(advertise: str) -> None:
    host, _, port = advertise.rpartition(":")
    is_bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    is_port = port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535
    if not host or is_bare_ipv6 or not is_port or _is_wildcard(host):
        raise ConfigError(
            f"advertise is {advertise!r}; give host:port as others dial it, for example 10.0.0.7:50053 or "
            "[fd00::7]:50053",
            field="advertise",
        )


def _is_wildcard(host: str) -> bool:
    bare = host.removeprefix("[").removesuffix("]")
    with suppress(ValueError):
        return ip_address(bare).is_unspecified
    # gRPC takes an empty host for every address too.
    return not bare
