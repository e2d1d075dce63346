"""The version that two workers of different releases speak."""

from __future__ import annotations

import pytest

from baton.errors import IncompatiblePeer
from kvtransfer.version import NEWEST_VERSION, OLDEST_VERSION, agree


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
def test_the_newest_that_both_know_is_spoken(
    ours: tuple[int, int], theirs: tuple[int, int], spoken: int
) -> None:
    assert agree(ours, theirs, "decode-0") == spoken


@pytest.mark.parametrize(
    ("ours", "theirs"), [((1, 2), (3, 4)), ((3, 4), (1, 2)), ((1, 1), (0, 0)), ((2, 2), (1, 1))]
)
def test_releases_more_than_one_apart_refuse_each_other(
    ours: tuple[int, int], theirs: tuple[int, int]
) -> None:
    with pytest.raises(IncompatiblePeer, match="decode-0 speaks versions") as caught:
        agree(ours, theirs, "decode-0")
    assert caught.value.field == "transfer_version"
    assert f"{theirs[0]} to {theirs[1]}" in caught.value.message
    assert f"{ours[0]} to {ours[1]}" in caught.value.message


def test_this_release_speaks_its_own_version_and_at_most_the_one_before() -> None:
    assert 0 <= NEWEST_VERSION - OLDEST_VERSION <= 1
