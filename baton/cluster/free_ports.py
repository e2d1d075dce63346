"""Which TCP ports of this machine are free, asked before anything is started."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from itertools import count, islice
from pathlib import Path

from baton.errors import ConfigError

LOOPBACK = "127.0.0.1"
# Ports from here on are nobody's in particular; below lie those of well-known services.
FIRST_PORT = 20_000
# Where the kernel takes the ports of outgoing connections from; the second number is their end.
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
USUAL_EPHEMERAL_START = 32_768
NUM_TRIES = 64
# One process never chooses a port twice: the first may not be in use yet. Several begin at different places.
_CHOICES = count(secrets.randbelow(USUAL_EPHEMERAL_START))


def claim(port: int, setting: str) -> int:
    """The port itself if it is free, a free one for 0.

    A server that dies comes back at its port. So a port that is chosen here is none that the kernel gives to
    outgoing connections: one of these could have it by then, and keep it.

    setting: name of the setting that chose it; ConfigError names it when the port is taken.
    The port is only looked at: between this call and its use another process may take it.
    """
    num_ports = _ephemeral_start() - FIRST_PORT
    if port == 0 and num_ports > NUM_TRIES:
        for choice in islice(_CHOICES, NUM_TRIES):
            with suppress(OSError):
                return _bind(FIRST_PORT + choice % num_ports)
    try:
        return _bind(port)
    except OSError as error:
        flag = "--" + setting.replace("_", "-")
        message = (
            f"port {port} ({setting}) cannot be used: {error.strerror}. Is another cluster running "
            f"(`baton status`)? Stop it, or choose another port with {flag}"
        )
        raise ConfigError(message, field=setting) from None


def _bind(port: int) -> int:
    """The port that was bound, and is free again; raises OSError if it is taken."""
    with socket.socket() as probe:
        # A port that a closed connection still lingers on is free for a server.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((LOOPBACK, port))
        bound: int = probe.getsockname()[1]
        return bound


def _ephemeral_start() -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(EPHEMERAL_PORTS.read_text().split()[0])
    return USUAL_EPHEMERAL_START
