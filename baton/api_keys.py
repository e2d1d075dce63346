"""API keys: what a caller shows a router to say who it is.

Owns the form of a key, the metadata of a call that carries it, its digest, and the rule that it
does not cross a network in plain text. It knows no tenant. A key enters neither logs nor files; what
stands in a file is its digest. The digest has no salt, so that it can be looked up: it protects
only a key that nobody can guess, which is why short ones are refused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from baton.errors import ConfigError
from baton.targets import is_local

# Of a gRPC call; lower case, as HTTP/2 wants it.
METADATA_KEY: Final = "authorization"
SCHEME: Final = "Bearer"
DIGEST_PREFIX: Final = "sha256:"
MIN_KEY_CHARS: Final = 16
MAX_KEY_CHARS: Final = 256


@dataclass(frozen=True, slots=True, eq=False)
class ApiKey:
    """A key that can be sent; neither repr() nor an error shows it.

    secret: 16 to 256 ASCII characters without blanks.

    Raises ConfigError for anything else.

    >>> ApiKey("0123456789abcdef")
    ApiKey()
    """

    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        pattern = rf"[!-~]{{{MIN_KEY_CHARS},{MAX_KEY_CHARS}}}"
        if not isinstance(self.secret, str) or not re.fullmatch(pattern, self.secret):
            raise ConfigError(
                f"the API key must be {MIN_KEY_CHARS} to {MAX_KEY_CHARS} ASCII characters without blanks; "
                "`openssl rand -hex 32` draws a good one",
                field="api_key",
            )

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a gRPC call carries."""
        return ((METADATA_KEY, f"{SCHEME} {self.secret}"),)

    @property
    def digest(self) -> str:
        """What a tenants' file holds: "sha256:" and 64 hexadecimal digits."""
        return digest_of(self.secret)


# A function is asked before each call, so that a key may change while a client lives.
KeySource = ApiKey | Callable[[], str]


def digest_of(secret: str) -> str:
    """The digest of a presented key, whatever its form."""
    return DIGEST_PREFIX + hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def refuse_plain_text(targets: Iterable[str]) -> None:
    """Raises ConfigError for the first target that a key would travel to over a network.

    targets: addresses that are dialled without TLS, host:port or other gRPC names.
    """
    for target in targets:
        if not is_local(target):
            raise ConfigError(
                f"the API key would cross the network to {target} in plain text; set tls_ca, or say "
                "insecure_key if something else encrypts the way there",
                field="api_key",
            )
