"""Folders whose content decides what runs here: nobody else may write to them."""

from __future__ import annotations

import os
from pathlib import Path


def make_private(folder: Path) -> None:
    """Makes the folder where it is missing. Raises OSError where it cannot be used, or would not be safe."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise PermissionError(f"{folder} can be written by others; chmod 700 it, or set BATON_CACHE_DIR")
