"""The versions of the KV transfer that this release speaks."""

from __future__ import annotations

from typing import Final

from baton.versions import Versions

# There has been one version so far. No release has frames of it without the bit that says their order
# (kvtransfer/wire.py), so no other version is owed for that bit.
TRANSFER_VERSIONS: Final = Versions(oldest=1, newest=1)


def agree(ours: Versions, theirs: Versions, peer: str) -> int:
    """The version that two workers speak; raises IncompatiblePeer if there is none."""
    return ours.agree(theirs, protocol="the KV transfer", peer=peer, field="transfer_version")
