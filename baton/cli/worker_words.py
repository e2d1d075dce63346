"""A worker of a pool in words and plain values: its role, its state, and how long it has been in that."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from baton.v1 import common_pb2, pool_service_pb2
from baton.v1.pool_service_pb2 import PoolWorker


def role_name(role: common_pb2.Role.ValueType) -> str:
    """ "prefill" for ROLE_PREFILL."""
    return common_pb2.Role.Name(role).removeprefix("ROLE_").lower()


def state_name(state: pool_service_pb2.PoolWorkerState.ValueType) -> str:
    """ "serving" for POOL_WORKER_STATE_SERVING."""
    return pool_service_pb2.PoolWorkerState.Name(state).removeprefix("POOL_WORKER_STATE_").lower()


def duration(milliseconds: int) -> str:
    """One unit is enough: "42 s", "3 min", "2 h"."""
    seconds = milliseconds // 1000
    for size, unit in ((7200, "h"), (120, "min")):
        if seconds >= size:
            return f"{seconds // (size // 2)} {unit}"
    return f"{seconds} s"


def count(number: int, noun: str) -> str:
    """ "1 attempt", "2 attempts"."""
    return f"{number} {noun}" + "s" * (number != 1)


def listed(workers: Iterable[PoolWorker]) -> str:
    """ "decode-1 (starting), decode-2 (placing)"."""
    return ", ".join(f"{worker.name} ({state_name(worker.state)})" for worker in workers)


def as_dict(worker: PoolWorker) -> dict[str, Any]:
    """Every field under its name in the proto, for JSON; role and state as words."""
    fields = {field.name: getattr(worker, field.name) for field in worker.DESCRIPTOR.fields}
    return fields | {"role": role_name(worker.role), "state": state_name(worker.state)}
