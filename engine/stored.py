"""What a step under way has stored so far, for whoever sends it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from engine.kv_staging import StagedStep


@dataclass(frozen=True, slots=True)
class Stored:
    """event: fires once it is there; None: it is.  staged: where a part of it lies a second time."""

    event: torch.cuda.Event | None = None
    staged: StagedStep | None = None


# There already, and nowhere else.
DONE = Stored()
