"""How far a worker of a pool is."""

from __future__ import annotations

from enum import Enum

from baton.v1 import pool_service_pb2


class State(Enum):
    """The values are those of the wire, where each is described."""

    PLACING = pool_service_pb2.POOL_WORKER_STATE_PLACING
    STARTING = pool_service_pb2.POOL_WORKER_STATE_STARTING
    SERVING = pool_service_pb2.POOL_WORKER_STATE_SERVING
    DRAINING = pool_service_pb2.POOL_WORKER_STATE_DRAINING
    RESTARTING = pool_service_pb2.POOL_WORKER_STATE_RESTARTING
    FAILED = pool_service_pb2.POOL_WORKER_STATE_FAILED
    UNHEALTHY = pool_service_pb2.POOL_WORKER_STATE_UNHEALTHY
