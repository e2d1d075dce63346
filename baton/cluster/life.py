"""What the supervisor knows of one process: how far it is, since when, and what went wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LifeState = Literal["running", "draining", "restarting", "failed"]


@dataclass(slots=True)
class Life:
    """One process over all its starts.

    state: "restarting" is the pause after a death; "failed" is given up.
    reason: the last death in words, while it is restarting or failed.
    """

    state: LifeState = "restarting"
    reason: str = ""
    num_restarts: int = 0
