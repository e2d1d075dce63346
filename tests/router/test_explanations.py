"""Which requests a router still knows the way of."""

from __future__ import annotations

from router.explanations import Explanations
from router.timeline import Timeline


def add(known: Explanations, request_id: str) -> Timeline:
    timeline = Timeline(0.0)
    known.begin(request_id).append(timeline)
    return timeline


def test_a_request_is_found_while_it_runs_and_when_it_has_ended() -> None:
    known = Explanations()
    timeline = add(known, "a")
    assert known.find("a") == [timeline]
    known.end("a")
    assert known.find("a") == [timeline]
    assert known.find("b") == []


def test_all_answers_to_a_prompt_are_found_together() -> None:
    known = Explanations()
    answers = [add(known, "a") for _ in range(3)]
    assert known.find("a") == answers


def test_no_name_stands_for_the_one_that_ended_last() -> None:
    known = Explanations()
    assert known.find("") == []
    first, second = add(known, "a"), add(known, "b")
    add(known, "running")
    known.end("b")
    assert known.find("") == [second]
    known.end("a")
    assert known.find("") == [first]


def test_of_the_ended_ones_the_last_are_kept_and_those_that_run_always() -> None:
    known = Explanations(max_ended=2)
    running = add(known, "running")
    for name in "abc":
        add(known, name)
        known.end(name)
    assert [bool(known.find(name)) for name in "abc"] == [False, True, True]
    assert known.find("running") == [running]


def test_a_second_request_of_a_name_stands_for_it() -> None:
    known = Explanations(max_ended=2)
    add(known, "a")
    known.end("a")
    add(known, "b")
    known.end("b")
    again = add(known, "a")
    assert known.find("a") == [again]
    known.end("a")
    # It takes the place of the first, as the latest: another one that ends pushes "b" out.
    add(known, "c")
    known.end("c")
    assert known.find("a") == [again]
    assert known.find("b") == []


def test_ending_what_is_not_known_changes_nothing() -> None:
    known = Explanations()
    timeline = add(known, "a")
    known.end("b")
    known.end("a")
    known.end("a")
    assert known.find("a") == [timeline]
    assert not known._running
