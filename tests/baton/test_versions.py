"""The version that two processes of different releases speak."""

from __future__ import annotations

import pytest

from baton.errors import IncompatiblePeer
from baton.identity import SESSION_VERSIONS
from baton.versions import Versions
from kvtransfer.version import TRANSFER_VERSIONS

Pair = tuple[int, int]


def agree(ours: Pair, theirs: Pair) -> int:
    return Versions(*ours).agree(Versions(*theirs), protocol="the protocol", peer="decode-0", field="version")


@pytest.mark.parametrize(
    ("ours", "theirs", "spoken"),
    [
        ((1, 1), (1, 1), 1),
        ((1, 2), (1, 1), 1),
        ((1, 1), (1, 2), 1),
        ((2, 3), (1, 2), 2),
        ((1, 2), (2, 3), 2),
        ((2, 3), (2, 3), 3),
        ((1, 9), (4, 7), 7),
    ],
)
def test_the_newest_that_both_know_is_spoken(ours: Pair, theirs: Pair, spoken: int) -> None:
    assert agree(ours, theirs) == spoken


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ((1, 2), (3, 4), "decode-0 speaks versions 3 to 4 of the protocol, this process versions 1 to 2"),
        ((3, 4), (1, 2), "decode-0 speaks versions 1 to 2 of the protocol, this process versions 3 to 4"),
        ((1, 1), (0, 0), "decode-0 speaks version 0"),
        ((0, 1), (0, 0), "decode-0 speaks version 0"),
        ((2, 2), (1, 1), "decode-0 speaks version 1 of the protocol, this process version 2"),
        ((1, 2), (3, 2), "decode-0 speaks versions 3 to 2"),
    ],
)
def test_without_a_common_version_both_are_named(ours: Pair, theirs: Pair, words: str) -> None:
    with pytest.raises(IncompatiblePeer) as caught:
        agree(ours, theirs)
    assert caught.value.field == "version"
    assert words in caught.value.message
    assert "at most one apart" in caught.value.message


@pytest.mark.parametrize("versions", [SESSION_VERSIONS, TRANSFER_VERSIONS])
def test_this_release_speaks_its_own_version_and_at_most_the_one_before(versions: Versions) -> None:
    assert versions.oldest >= 1
    assert 0 <= versions.newest - versions.oldest <= 1
