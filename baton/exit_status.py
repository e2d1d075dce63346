"""With which status a role ends that cannot run, and which error that stands for where the role was started.

Whoever starts a role learns from the status alone who has to act; the words are in the role's log. The same
numbers mean the same where `baton` ends with them (baton/cli/exit_codes.py), which has some more.
"""

from __future__ import annotations

from typing import Final

from baton.errors import BatonError, ConfigError, ModelError, Unavailable

FAILED: Final = 1
WRONG_SETTING: Final = 2
UNUSABLE_MODEL: Final = 5

_ERRORS: Final[dict[int, type[BatonError]]] = {WRONG_SETTING: ConfigError, UNUSABLE_MODEL: ModelError}


def status_of(error: BatonError) -> int:
    """The exit status of a role that this error keeps from running."""
    return next((status for status, kind in _ERRORS.items() if isinstance(error, kind)), FAILED)


def error_of(status: int) -> type[BatonError]:
    """What to raise for a role that ended with this status; Unavailable where that says nothing."""
    return _ERRORS.get(status, Unavailable)
