"""Lets the engine and the transfer layer run where only torch, triton and numpy are installed.

Owns stand-ins for the two other packages that they import: structlog, for their logs, and xxhash, for the
digests of frames. A package that is installed is used as it is. To be called before anything of Baton's is
imported, in every process:

    from benchmarks.on_gpu import bare
    bare.install()
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from hashlib import blake2b
from types import ModuleType
from typing import Any


def install() -> tuple[str, ...]:
    """Puts stand-ins in the place of what is not installed; returns which packages have one. Idempotent."""
    for package, (module, content) in _STAND_INS.items():
        if sys.modules.get(module) is None and not _is_installed(package):
            sys.modules[module] = StandIn(module, content)
    return tuple(package for package, (module, _) in _STAND_INS.items() if _has_stand_in(module))


def digest_name() -> str:
    """What frames are verified with in this process."""
    return "blake2b, 64 bits" if _has_stand_in("xxhash") else "xxh3, 64 bits"


class StandIn(ModuleType):
    """A module in the place of another."""

    def __init__(self, name: str, content: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.__dict__.update(content)


class Digest:
    """As xxhash.xxh3_64: 64 bits that differ where the bytes do, by another function."""

    def __init__(self, data: bytes | memoryview = b"") -> None:
        self._hash = blake2b(data, digest_size=8)

    def update(self, data: bytes | memoryview) -> None:
        """Adds bytes."""
        self._hash.update(data)

    def intdigest(self) -> int:
        """The digest, below 2^64."""
        return int.from_bytes(self._hash.digest(), "little")


class Log:
    """As a logger of baton.logs.get_logger(): an event and its fields, on standard error."""

    def __init__(self, name: str) -> None:
        self._name = name

    def info(self, event: str, **fields: Any) -> None:
        """Not a trouble."""
        self._say("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """A trouble."""
        self._say("warning", event, fields)

    def _say(self, level: str, event: str, fields: dict[str, Any]) -> None:
        said = " ".join(f"{name}={value}" for name, value in fields.items())
        print(f"{level} {self._name}: {event} {said}", file=sys.stderr)


def _is_installed(package: str) -> bool:
    try:
        importlib.import_module(package)
    except ImportError:
        return False
    return True


def _has_stand_in(module: str) -> bool:
    return isinstance(sys.modules.get(module), StandIn)


# By package: the module that stands in, and what it has. Of Baton, one module knows structlog.
_STAND_INS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "structlog": ("baton.logs", {"get_logger": Log}),
    "xxhash": ("xxhash", {"xxh3_64": Digest}),
}
