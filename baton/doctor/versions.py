"""What is installed, against what the distribution asks for."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata

from baton.doctor.check import Check, ok, problem, warning

DISTRIBUTION = "baton-serve"
# Those whose versions matter to what is exchanged or computed, of the many that are asked for.
_SHOWN = ("grpcio", "protobuf", "torch", "triton", "ray", "redis", "tokenizers", "nixl")
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(\[[^\]]*\])?\s*(>=\s*(?P<least>[^;,\s]+))?")
_EXTRA = re.compile(r"extra == ['\"]([\w-]+)['\"]")

Installed = Callable[[str], str | None]


def installed(name: str) -> str | None:
    """Version of a distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def checks(look_up: Installed = installed) -> Iterator[Check]:
    """Python, then each package that matters, then every other one that is missing or too old."""
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
        least_python = (metadata.metadata(DISTRIBUTION)["Requires-Python"] or "").removeprefix(">=")
    except metadata.PackageNotFoundError:
        yield warning("versions", f"{DISTRIBUTION} is not installed", "pip install -e . in the source tree")
        return
    yield python(least_python)
    yield from packages(requirements, look_up)


def python(least: str) -> Check:
    """Python itself."""
    version = platform.python_version()
    if sys.version_info[:2] < parts(least)[:2]:
        return problem("python", version, f"{least} or newer is needed")
    return ok("python", f"{version} ({sys.executable})")


def packages(requirements: Sequence[str], look_up: Installed) -> Iterator[Check]:
    """One by one. A package of an extra may be missing; what is there must be new enough."""
    seen: set[str] = set()
    for requirement in requirements:
        found = _REQUIREMENT.match(requirement)
        extra = _EXTRA.search(requirement)
        if found is None or found["name"] in seen or found["name"] == DISTRIBUTION:
            continue
        # Tools of contributors are no concern of who runs a cluster.
        if extra is not None and extra[1] == "dev":
            continue
        seen.add(found["name"])
        check = package(found["name"], found["least"] or "0", look_up(found["name"]), extra and extra[1])
        if check.state != "ok" or found["name"] in _SHOWN:
            yield check


def package(name: str, least: str, version: str | None, extra: str | None) -> Check:
    """One package. extra: the extra that it is part of, or None."""
    if version is None and extra is not None:
        return ok(name, f"not installed; part of {DISTRIBUTION}[{extra}]")
    if version is None:
        return problem(name, "not installed", f"pip install '{name}>={least}'")
    if parts(version) < parts(least):
        return problem(name, f"{version}; {least} or newer is needed", f"pip install '{name}>={least}'")
    return ok(name, version)


def parts(version: str) -> tuple[int, ...]:
    """The numbers of a version up to the first that is none: "2.11.0+cpu" is (2, 11, 0)."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()
