"""Which requests a router still knows the way of."""

from __future__ import annotations

from router.explanations import Explanations
from router.timeline import Timeline


def begin(known: Explanations, request_id: str, num_answers: int = 1) -> list[Timeline]:
    answers = known.begin(request_id)
    answers.extend(Timeline(0.0) for _ in range(num_answers))
    return answers


def run(known: Explanations, request_id: str) -> list[Timeline]:
    answers = begin(known, request_id)
    known.end(request_id, answers)
    return answers


def test_a_request_is_found_while_it_runs_and_when_it_has_ended() -> None:
    known = Explanations()
    answers = begin(known, "a")
    assert known.find("a") is answers
    known.end("a", answers)
    assert known.find("a") is answers
    assert known.find("b") == []


def test_all_answers_to_a_prompt_are_found_together() -> None:
    known = Explanations()
    answers = begin(known, "a", num_answers=3)
    assert len(known.find("a")) == 3
    assert known.find("a") is answers


def test_no_name_stands_for_the_one_that_ended_last() -> None:
    known = Explanations()
    assert known.find("") == []
    first, second = begin(known, "a"), begin(known, "b")
    begin(known, "running")
    known.end("b", second)
    assert known.find("") is second
    known.end("a", first)
    assert known.find("") is first


def test_of_the_ended_ones_the_last_are_kept_and_those_that_run_always() -> None:
    known = Explanations(max_ended=2)
    running = begin(known, "running")
    for name in "abc":
        run(known, name)
    assert [bool(known.find(name)) for name in "abc"] == [False, True, True]
    assert known.find("running") is running


def test_a_second_request_of_a_name_stands_for_it_as_the_latest() -> None:
    known = Explanations(max_ended=2)
    run(known, "a")
    run(known, "b")
    again = begin(known, "a")
    assert known.find("a") is again
    known.end("a", again)
    # Another one that ends pushes "b" out.
    run(known, "c")
    assert known.find("a") is again
    assert known.find("b") == []


def test_two_of_a_name_at_once_do_not_end_each_other() -> None:
    known = Explanations()
    first, second = begin(known, "a"), begin(known, "a")
    known.end("a", first)
    assert known.find("a") is second
    known.end("a", second)
    assert known.find("a") is second
    assert not known._running
