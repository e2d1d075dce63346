"""Which version of the transfer two workers speak, when not all of a cluster runs the same release.

Owns the rule: a release speaks its own version and the one before, so that a cluster can be upgraded
worker by worker; the newest that both know is spoken.
"""

from __future__ import annotations

from baton.errors import IncompatiblePeer

# There has been one version so far. No release has frames of it without the bit that says their order
# (kvtransfer/wire.py), so no other version is owed for that bit.
OLDEST_VERSION = 1
NEWEST_VERSION = 1


def agree(ours: tuple[int, int], theirs: tuple[int, int], peer: str) -> int:
    """The version to speak, of each side's (oldest, newest); raises IncompatiblePeer if there is none."""
    version = min(ours[1], theirs[1])
    if version < max(ours[0], theirs[0]):
        raise IncompatiblePeer(
            f"{peer} speaks versions {theirs[0]} to {theirs[1]} of the KV transfer, this worker {ours[0]} to "
            f"{ours[1]}; run releases that are at most one apart",
            field="transfer_version",
        )
    return version
