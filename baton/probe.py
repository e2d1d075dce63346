"""`python -m baton.probe`: asks a process of this machine for its health, and says it by the exit status.

For container engines, whose health checks are commands; Kubernetes asks by itself. The process is a router, a
worker or a pool with a health_port. Owns nothing; needs the package for health checking, as every role does.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.bind import LOOPBACK
from baton.errors import ConfigError
from baton.process import report_errors
from baton.rpc_server import READINESS

# Engines keep other numbers for themselves.
HEALTHY: Final = 0
UNHEALTHY: Final = 1

# The variables by which a process is told its port are those of the container, so they are here too.
_HEALTH_PORT = re.compile(r"BATON_[A-Z]+_HEALTH_PORT")
# The health service is on this machine, whatever proxy the environment names.
_NO_PROXY = (("grpc.enable_http_proxy", 0),)


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """HEALTHY or UNHEALTHY; one line on standard output says which, or why nothing is known.

    Raises ConfigError, field "port", if it is not told whom to ask.
    """
    parser = argparse.ArgumentParser(
        prog="python -m baton.probe", description="Asks a process for its health."
    )
    parser.add_argument("port", type=int, nargs="?", help="its health_port; else that of BATON_*_HEALTH_PORT")
    parser.add_argument("--service", default=READINESS, help="readiness or liveness; default: %(default)s")
    parser.add_argument("--timeout-s", type=float, default=3.0, help="default: %(default)s")
    options = parser.parse_args(argv)
    port = options.port if options.port is not None else _port_of(environ)
    return _ask(f"{LOOPBACK}:{port}", options.service, options.timeout_s)


def _port_of(environ: Mapping[str, str]) -> int:
    found = {name: value for name, value in environ.items() if _HEALTH_PORT.fullmatch(name)}
    ports = set(found.values())
    if len(ports) != 1 or not (port := ports.pop()).isdecimal():
        said = ", ".join(f"{name}={value}" for name, value in sorted(found.items())) or "none is set"
        raise ConfigError(
            f"give the port to ask, or one by BATON_ROUTER_HEALTH_PORT or the like ({said})", field="port"
        )
    return int(port)


def _ask(address: str, service: str, timeout_s: float) -> int:
    with grpc.insecure_channel(address, options=_NO_PROXY) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            return _say(f"{address} does not answer: {error.details()}", UNHEALTHY)
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    is_healthy = answer.status == health_pb2.HealthCheckResponse.SERVING
    return _say(f"{service}: {status}", HEALTHY if is_healthy else UNHEALTHY)


def _say(text: str, status: int) -> int:
    sys.stdout.write(f"{text}\n")
    return status


if __name__ == "__main__":
    sys.exit(report_errors(lambda: main(sys.argv[1:], os.environ)))
