"""Who starts next, and how often a request can be overtaken (case B15)."""

from __future__ import annotations

from collections.abc import Iterable

from engine.request import Request
from engine.waiting_line import MAX_OVERTAKEN, MAX_TRIED, WaitingLine
from tests.engine.tiny_models import make_request


def line_of(*requests: Request) -> WaitingLine:
    line = WaitingLine()
    for request in requests:
        line.add(request)
    return line


def request(number: int, *, size: int = 1, age: float | None = None) -> Request:
    """Size: what it needs, in units of the test, kept as its number of tokens."""
    return make_request([7] * size, number=number, arrived_at=number if age is None else age)


def taken(line: WaitingLine, room: int, *, unready: Iterable[Request] = ()) -> list[int]:
    """The numbers of those that start with so much room, in their order."""

    def try_start(asking: Request) -> bool:
        nonlocal room
        fits = asking.num_tokens <= room
        room -= asking.num_tokens if fits else 0
        return fits

    waiting = list(unready)
    started = line.take(lambda r: r not in waiting, try_start)
    return [int.from_bytes(r.attempt_id, "big") for r in started]


def test_the_oldest_start_first_wherever_they_came_from() -> None:
    line = line_of(request(1, age=5), request(2, age=7), request(3, age=4), request(4, age=7))
    assert taken(line, room=3) == [3, 1, 2]
    assert [r.arrived_at for r in line] == [7]


def test_who_fits_overtakes_who_does_not() -> None:
    line = line_of(request(1, size=30), *[request(number) for number in range(2, 22)])
    assert taken(line, room=10) == list(range(2, 12))
    assert len(line) == 11
    assert (1).to_bytes(16, "big") in line


def test_after_so_many_nothing_younger_starts_before_it() -> None:
    line = line_of(request(1, size=30), *[request(number) for number in range(2, 102)])
    started = [number for _ in range(100) for number in taken(line, room=1)]
    assert started == list(range(2, 2 + MAX_OVERTAKEN))
    # Room collects; then it is its turn, and theirs.
    assert taken(line, room=29) == []
    assert taken(line, room=31) == [1, 2 + MAX_OVERTAKEN]


def test_one_pass_stops_at_the_bound_too() -> None:
    line = line_of(request(1, size=200), *[request(number) for number in range(2, 102)])
    assert len(taken(line, room=100)) == MAX_OVERTAKEN


def test_equal_requests_keep_their_order_though_one_was_passed_over() -> None:
    line = line_of(*[request(number, size=4) for number in range(1, 5)], request(5, size=1))
    assert taken(line, room=5) == [1, 5]
    assert taken(line, room=3) == []
    assert taken(line, room=12) == [2, 3, 4]


def test_who_is_not_ready_stands_aside_and_is_not_counted_as_overtaken() -> None:
    late = request(1, size=2)
    line = line_of(late, *[request(number) for number in range(2, 102)])
    assert taken(line, room=60, unready=[late]) == list(range(2, 62))
    assert taken(line, room=1) == [62]
    assert taken(line, room=2) == [1]


def test_every_older_one_is_overtaken_by_the_same_start() -> None:
    small = [request(number) for number in range(3, 103)]
    line = line_of(request(1, size=30), request(2, size=20), *small)
    assert taken(line, room=19) == list(range(3, 22))
    line.pop((1).to_bytes(16, "big"))
    # The second was passed over as often as the first.
    assert len(taken(line, room=19)) == MAX_OVERTAKEN - 19
    assert taken(line, room=19) == []


def test_who_comes_back_is_not_blamed_for_what_was_before() -> None:
    big = request(1, size=30)
    line = line_of(big, *[request(number) for number in range(2, 102)])
    taken(line, room=29)
    assert line.pop(big.attempt_id) is big
    line.add(big)
    assert len(taken(line, room=29)) == 29


def test_behind_very_many_that_do_not_fit_nobody_is_looked_at() -> None:
    many = [request(number, size=9) for number in range(MAX_TRIED)]
    assert taken(line_of(*many, request(900)), room=1) == []
    assert taken(line_of(*many[1:], request(900)), room=1) == [900]


def test_who_stops_early_leaves_the_rest_waiting() -> None:
    line = line_of(request(1), request(2), request(3))
    assert next(line.take(lambda _: True, lambda _: True)).arrived_at == 1
    assert [r.arrived_at for r in line] == [2, 3]
