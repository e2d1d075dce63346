"""Who was there when, remembered beyond the link."""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.v1 import common_pb2
from router.attendance import Attendance

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE


@dataclass(frozen=True)
class Seen:
    incarnation: int
    num_kv_tokens: int
    role: common_pb2.Role.ValueType = DECODE
    is_ready: bool = True
    is_alive: bool = True


def test_one_that_was_there_after_a_time_is_known_however_it_went() -> None:
    attendance = Attendance()
    attendance.take([Seen(1, 100)], now=10.0)
    attendance.take([Seen(1, 100, is_alive=False, is_ready=False)], now=12.0)
    assert [attendance.was_alive_after(1, at) for at in (9.0, 10.0, 12.0)] == [True, False, False]
    attendance.take([Seen(1, 100)], now=13.0)
    attendance.take([], now=20.0)
    assert [attendance.was_alive_after(1, at) for at in (12.0, 13.0)] == [True, False]
    assert not attendance.was_alive_after(2, 0.0)


def test_the_last_of_those_that_are_large_enough_counts_from_when_it_ceased_to_take_requests() -> None:
    attendance = Attendance()
    small, large = Seen(1, 100), Seen(2, 500)
    attendance.take([small, large], now=1.0)
    assert attendance.went_at(DECODE, 1) is None
    leaving = replace(large, is_ready=False)
    attendance.take([small, leaving], now=5.0)
    attendance.take([small, leaving], now=6.0)
    attendance.take([small], now=8.0)
    assert [attendance.went_at(DECODE, size) for size in (100, 500, 501)] == [5.0, 5.0, None]
    assert attendance.went_at(PREFILL, 1) is None
    attendance.take([], now=9.0)
    assert [attendance.went_at(DECODE, size) for size in (100, 101)] == [9.0, 5.0]


def test_one_that_is_back_has_not_gone() -> None:
    attendance = Attendance()
    attendance.take([Seen(2, 500)], now=1.0)
    attendance.take([], now=2.0)
    attendance.take([Seen(2, 500)], now=3.0)
    assert attendance.went_at(DECODE, 500) is None


def test_one_that_never_took_requests_is_not_waited_for_and_keeps_no_size() -> None:
    attendance = Attendance()
    attendance.take([Seen(1, 0, is_ready=False)], now=1.0)
    attendance.take([], now=2.0)
    assert attendance.went_at(DECODE, 0) is None
    # Dialled again it drains, and does not say how large it is.
    attendance.take([Seen(2, 500)], now=3.0)
    attendance.take([Seen(2, 0, is_ready=False)], now=4.0)
    assert attendance.went_at(DECODE, 500) == 4.0


def test_of_those_that_have_gone_the_last_are_kept_and_all_that_are_there() -> None:
    attendance = Attendance(max_gone=2)
    staying = [Seen(number, 100) for number in (100, 101, 102)]
    attendance.take([*staying, *(Seen(number, 100) for number in range(3))], now=1.0)
    attendance.take([*staying, Seen(2, 100)], now=2.0)
    attendance.take(staying, now=3.0)
    known = [number for number in (0, 1, 2, 100, 101, 102) if attendance.was_alive_after(number, 0.0)]
    assert known == [1, 2, 100, 101, 102]
