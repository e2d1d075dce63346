"""Where servers listen unless told otherwise, and why an address cannot be had.

Knows neither gRPC nor HTTP.
"""

from __future__ import annotations

import socket
from typing import Final

LOOPBACK: Final = "127.0.0.1"


def why_not(host: str, port: int) -> str:
    """Why an address cannot be bound, and what to do; asks the kernel, as gRPC does not tell."""
    remedy = f"choose a host of this machine, such as {LOOPBACK}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            remedy = "the address is free now; try again"
    except PermissionError:
        remedy = "this user may not use this port; choose one above 1023"
    except socket.gaierror:
        remedy = f"the host is unknown; {remedy}"
    except OSError as error:
        taken = "another process listens there; stop it or choose another port (0 takes a free one)"
        remedy = taken if "in use" in str(error) else f"{error.strerror}; {remedy}"
    return remedy
