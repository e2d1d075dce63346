"""Which version of a protocol two processes speak, when not all of a cluster runs the same release.

Owns the rule: a release speaks its own version and the one before, so that a cluster can be upgraded
process by process; the newest that both know is spoken. What a peer of the older version must not ignore,
such as a new field that changes an answer, makes a new version.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import IncompatiblePeer


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions of one protocol that a process speaks: oldest to newest, both among them."""

    oldest: int
    newest: int

    def agree(self, theirs: Versions, *, protocol: str, peer: str, field: str) -> int:
        """The version to speak; raises IncompatiblePeer with the field if there is none.

        protocol: its name.  peer: name of the other process.
        """
        version = min(self.newest, theirs.newest)
        if version < max(self.oldest, theirs.oldest, 1):
            raise IncompatiblePeer(
                f"{peer} speaks {theirs} of {protocol}, this process {self}; run releases that are at most "
                "one apart",
                field=field,
            )
        return version

    def __str__(self) -> str:
        if self.oldest == self.newest:
            return f"version {self.newest}"
        return f"versions {self.oldest} to {self.newest}"
