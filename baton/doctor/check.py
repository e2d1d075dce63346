"""What one look found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """name: what was looked at. found: what is so. remedy: what to do, unless it is ok.

    A warning is something that may be wanted or may do harm later; with a problem something does not work.
    """

    name: str
    state: State
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert bool(self.remedy) == (self.state != "ok"), "a remedy goes with what is not ok"


def ok(name: str, found: str) -> Check:
    """Nothing to do."""
    return Check(name=name, state="ok", found=found)


def warning(name: str, found: str, remedy: str) -> Check:
    """Something that may do harm."""
    return Check(name=name, state="warning", found=found, remedy=remedy)


def problem(name: str, found: str, remedy: str) -> Check:
    """Something that does not work."""
    return Check(name=name, state="problem", found=found, remedy=remedy)
