"""Stop strings against a naive search of the whole text, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from router.stops import StopAutomaton, StopScanner

# Few letters, so that stops overlap, nest and nearly come up all the time.
LETTERS = st.text("abc", max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=6)


def naive(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the first stop ends and which it is: the longest of those that end there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


def could_become(text: str, stops: list[str]) -> int:
    """Length of the longest suffix that is a proper prefix of some stop."""
    prefixes = {stop[:length] for stop in stops for length in range(len(stop))}
    return max(length for length in range(len(text) + 1) if text[len(text) - length :] in prefixes)


def scanner(*stops: str, include: bool = False) -> StopScanner:
    return StopScanner(StopAutomaton(stops), include_stop=include)


@settings(max_examples=400, deadline=None)
@given(pieces=st.lists(LETTERS, max_size=12), stops=STOPS)
def test_text_ends_before_the_first_stop_and_what_could_become_one_is_held(
    pieces: list[str], stops: list[str]
) -> None:
    scan, seen, passed = scanner(*stops), "", ""
    for piece in pieces:
        seen += piece
        passed += scan.push(piece)
        found = naive(seen, stops)
        if found is not None:
            end, stop = found
            assert (scan.matched, passed) == (stop, seen[: end - len(stop)])
            assert scan.flush() == ""
            return
        assert scan.matched == ""
        assert passed == seen[: len(seen) - could_become(seen, stops)]
    assert passed + scan.flush() == seen


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(LETTERS, max_size=12), stops=STOPS)
def test_with_the_stop_included_nothing_is_held(pieces: list[str], stops: list[str]) -> None:
    scan, seen, passed = scanner(*stops, include=True), "", ""
    for piece in pieces:
        seen += piece
        passed += scan.push(piece)
        found = naive(seen, stops)
        if found is not None:
            assert (scan.matched, passed) == (found[1], seen[: found[0]])
            return
        assert passed == seen


def test_a_stop_across_pieces() -> None:
    scan = scanner("\nUser:")
    assert [scan.push(piece) for piece in ("one\n", "Us", "e two\nUser", ":", )] == [
        "one", "", "\nUse two", "",
    ]  # fmt: skip
    assert scan.matched == "\nUser:"


def test_a_near_miss_goes_on_as_another_stop() -> None:
    scan = scanner("abab", "bac")
    assert scan.push("abac") == "a"
    assert scan.matched == "bac"


def test_the_longest_stops_are_allowed() -> None:
    stops = ["x" * 256 if index == 0 else chr(65 + index) * 256 for index in range(16)]
    scan = scanner(*stops)
    assert scan.push("x" * 255) == ""
    assert scan.push("x") == ""
    assert scan.matched == "x" * 256


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        (["a"] * 17, "17 texts; send at most 16"),
        (["a", ""], "1 to 256 characters"),
        (["a" * 257], "1 to 256 characters"),
    ],
    ids=["too-many", "empty", "too-long"],
)
def test_what_is_no_stop_is_refused(stops: list[str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as error:
        StopAutomaton(stops)
    assert error.value.field == "stop"
