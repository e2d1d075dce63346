"""Where Baton keeps what it downloads and computes. Knows paths only; creates nothing."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """$BATON_CACHE_DIR, else $XDG_CACHE_HOME/baton, else ~/.cache/baton."""
    if chosen := os.environ.get("BATON_CACHE_DIR"):
        return Path(chosen).expanduser()
    # The XDG base directory specification tells programs to ignore relative paths.
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return shared / "baton" if shared.is_absolute() else Path.home() / ".cache" / "baton"


def model_folder(name: str) -> Path:
    """Folder of a pulled model; the slash of a hub repository becomes two dashes."""
    return cache_dir() / "models" / name.replace("/", "--")
