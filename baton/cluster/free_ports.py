"""Which TCP ports of this machine are free, asked before anything is started."""

from __future__ import annotations

import socket

from baton.errors import ConfigError

LOOPBACK = "127.0.0.1"


def claim(port: int, setting: str) -> int:
    """The port itself if it is free, a free one for 0.

    setting: name of the setting that chose it; ConfigError names it when the port is taken.
    The port is only looked at: between this call and its use another process may take it.
    """
    with socket.socket() as probe:
        # A port that a closed connection still lingers on is free for a server.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            flag = "--" + setting.replace("_", "-")
            message = (
                f"port {port} ({setting}) cannot be used: {error.strerror}. Is another cluster running "
                f"(`baton status`)? Stop it, or choose another port with {flag}"
            )
            raise ConfigError(message, field=setting) from None
        claimed: int = probe.getsockname()[1]
        return claimed
