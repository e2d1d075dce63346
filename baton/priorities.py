"""The priorities of requests, and their names for people.

Owns the names. It knows neither who may use which nor what a queue makes of them. The values are
ordered: a higher one goes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from baton.v1 import common_pb2

PRIORITIES: Final[Mapping[str, common_pb2.Priority.ValueType]] = MappingProxyType(
    {
        "low": common_pb2.PRIORITY_LOW,
        "normal": common_pb2.PRIORITY_NORMAL,
        "high": common_pb2.PRIORITY_HIGH,
    }
)
PRIORITY_NAMES: Final[Mapping[int, str]] = MappingProxyType(
    {priority: name for name, priority in PRIORITIES.items()}
)
