"""Whether a stream may get colors and other styles, for what is written without rich."""

from __future__ import annotations

import os
from typing import TextIO


def may_style(stream: TextIO) -> bool:
    """A terminal, unless it is a dumb one or the user does not want it (NO_COLOR, --no-color)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
