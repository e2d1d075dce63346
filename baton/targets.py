"""Addresses of routers as users write them: their form, and whether they lie on this machine.

Knows no channel and no setting; nothing is resolved or dialled here.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from baton.errors import ConfigError

_SCHEMES: Final = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:")
# An IPv6 address has colons of its own and stands in brackets.
_HOST: Final = re.compile(r"[^\s:/\[\]]+|\[[0-9A-Fa-f:.%\w]+\]")


def check_target(target: str, name: str = "target") -> str:
    """The address, host:port or one of gRPC's own names; raises ConfigError for anything else.

    name: of the setting, for the message.

    >>> check_target("router.example.com:50051")
    'router.example.com:50051'
    >>> check_target("router.example.com")
    Traceback (most recent call last):
    baton.errors.ConfigError: target is 'router.example.com', which has no port; write host:port
    """
    if not isinstance(target, str):
        raise ConfigError(f"{name} is {target!r}, which is not text; write host:port", field=name)
    if target.startswith(_SCHEMES):
        return target
    host, _, port = target.rpartition(":")
    if _HOST.fullmatch(target):
        raise ConfigError(f"{name} is {target!r}, which has no port; write host:port", field=name)
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) <= 65535
    if not (is_port and _HOST.fullmatch(host)):
        raise ConfigError(f"{name} is {target!r}, which is not host:port", field=name)
    return target


def is_local(target: str) -> bool:
    """Whether it is on this machine for certain: a loopback address, "localhost" or a Unix socket."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    # gRPC's own schemes: dns:host:port, dns://authority/host:port, ipv4:address:port, ipv6:[address]:port.
    address = re.sub(r"^(dns|ipv4|ipv6):(//[^/]*/)?", "", target)
    host = address[1:].partition("]")[0] if address.startswith("[") else address.partition(":")[0]
    if host.lower() == "localhost":
        return "," not in address
    try:
        return "," not in address and ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
