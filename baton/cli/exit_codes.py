"""The exit codes of `baton`, all of them, and which error has which.

docs/cli.md has the same table. Who has to act: 2 and 5 are for the one who typed the command, 3 and 4 for
whoever runs the cluster, 1 for whoever reads the message.
"""

from __future__ import annotations

from typing import Final

from baton.errors import (
    BatonError,
    ConfigError,
    IncompatiblePeer,
    InvalidRequest,
    ModelError,
    Unauthenticated,
    Unavailable,
)
from baton.exit_status import FAILED, UNUSABLE_MODEL, WRONG_SETTING

EXIT_FAILED: Final = FAILED
EXIT_USAGE: Final = WRONG_SETTING
EXIT_UNREACHABLE: Final = 3
EXIT_NOT_READY: Final = 4
EXIT_MODEL: Final = UNUSABLE_MODEL
EXIT_INTERRUPTED: Final = 130

EXIT_CODES: Final[dict[int, str]] = {
    0: "done",
    EXIT_FAILED: "failed",
    EXIT_USAGE: "wrong usage or setting",
    EXIT_UNREACHABLE: "nothing answers",
    EXIT_NOT_READY: "not ready yet",
    EXIT_MODEL: "the model cannot be used",
    EXIT_INTERRUPTED: "interrupted",
}

# What nobody but the one who typed the command can mend.
_FOR_THE_USER = InvalidRequest | ConfigError | Unauthenticated
# Whoever answers at an address without serving the call is not the one who was meant.
_NOBODY_THERE = Unavailable | IncompatiblePeer


def exit_code(error: BatonError) -> int:
    """Exit code of an error: who has to act, the user, the network or us."""
    if isinstance(error, _NOBODY_THERE):
        return EXIT_UNREACHABLE
    if isinstance(error, ModelError):
        return EXIT_MODEL
    return EXIT_USAGE if isinstance(error, _FOR_THE_USER) else EXIT_FAILED


def in_words() -> str:
    """All of them in one line."""
    return "Exit codes: " + ", ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items()) + "."
