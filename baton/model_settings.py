"""Single settings of config.json: of the type they must be, or refused by name.

Knows which values there may be, not what a key means.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from baton.errors import ModelError


def whole_number(settings: Mapping[str, Any], key: str) -> int:
    """A positive integer; raises ModelError naming the key if it is none."""
    value = settings.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ModelError(f"config.json: {key} is {value!r}; it must be a positive integer")


def positive_number(settings: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A finite number above 0; default, if there is one, for what is absent or null. Raises ModelError."""
    value = settings.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max:
        return float(value)
    raise ModelError(f"config.json: {key} is {value!r}; write a positive number")


def switch(settings: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    """A boolean; default for what is absent or null. Raises ModelError for anything else."""
    value = settings.get(key)
    value = default if value is None else value
    if isinstance(value, bool):
        return value
    raise ModelError(f"config.json: {key} is {value!r}; write true or false")
