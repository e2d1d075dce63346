from __future__ import annotations

import pytest

from baton.cli.waterfall import phases_of, waterfall
from baton.route_explain import AttemptExplain, RouteExplain
from baton.v1 import route_explain_pb2
from tests.baton.cli.explained import explained, good_attempt


def drawn(proto: route_explain_pb2.RouteExplain, width: int = 100) -> list[str]:
    return [line.plain for line in waterfall(RouteExplain.from_proto(proto), width=width, in_ascii=True)]


def bars(proto: route_explain_pb2.RouteExplain) -> list[tuple[str, float, float]]:
    explain = RouteExplain.from_proto(proto)
    found = [phase for attempt in explain.attempts for phase in phases_of(attempt, explain)]
    return [(phase.label, phase.start_ms, phase.end_ms) for phase in found]


def in_flight(**moments: float) -> route_explain_pb2.RouteExplain:
    attempt = route_explain_pb2.AttemptExplain(number=1, queued_at_ms=0.0, **moments)
    return route_explain_pb2.RouteExplain(
        request_id="r", ttft_objective_ms=50.0, reported_at_ms=80.0, attempts=[attempt]
    )


def test_the_heading_says_what_was_asked_and_what_came_of_it() -> None:
    assert drawn(explained())[:4] == [
        "req-7, answer 0, at router-0: OK",
        "bucket 256-511: 400 prompt tokens, 64 cached, 96 output tokens expected",
        "tenant search, priority high",
        "TTFT 100.0 ms (objective 90.0 ms missed), total 170.0 ms, regret 12.5 ms",
    ]


def test_phases_follow_each_other_from_stamp_to_stamp() -> None:
    assert bars(explained())[3:] == [
        ("queue", 20, 30),
        ("reserve", 30, 40),
        ("prefill wait", 40, 60),
        ("prefill compute", 60, 100),
        # 50 ms of transfer end at the commit, 20 ms of them after the first token.
        ("transfer hidden", 70, 100),
        ("transfer tail", 100, 120),
        ("decode queue", 120, 140),
        ("decode", 140, 170),
    ]


def test_bars_stand_in_proportion_on_one_scale() -> None:
    # 100 columns leave 34 for bars after 18 of labels, 12 of milliseconds and 36 of notes: 5 ms a column.
    rows = {line[:18].strip(): line[18:52].rstrip() for line in drawn(explained())[13:21]}
    assert rows == {
        "queue": " " * 4 + "..",
        "reserve": " " * 6 + "..",
        "prefill wait": " " * 8 + "....",
        "prefill compute": " " * 12 + "########",
        "transfer hidden": " " * 14 + "======",
        "transfer tail": " " * 20 + "####",
        "decode queue": " " * 24 + "....",
        "decode": " " * 28 + "######",
    }


def test_rows_tell_milliseconds_tokens_and_megabytes() -> None:
    text = drawn(explained())
    compute = next(line for line in text if "prefill compute" in line)
    assert compute[52:] == "     40.0 ms  336 tokens in 3 steps, 64 cached"
    # 5 MB in 50 ms, the tail among them.
    hidden = next(line for line in text if "transfer hidden" in line)
    assert hidden.endswith("60% hidden of 5.00 MB, 100 MB/s")
    assert next(line for line in text if "transfer tail" in line).endswith("20.0 ms")


def test_what_was_never_placed_or_had_no_choice_has_no_bucket_and_no_regret() -> None:
    message = explained()
    message.bucket, message.regret_ms = "", 0.0
    text = drawn(message)
    assert not [line for line in text if "bucket" in line or "regret" in line]
    assert [line for line in text if line.endswith("prompt tokens")]


def test_plain_text_keeps_to_the_width() -> None:
    assert max(map(len, drawn(explained()))) <= 100


def test_a_broken_attempt_is_marked_where_it_broke_and_says_why() -> None:
    text = drawn(explained())
    title = text.index("attempt 1: placed: UNAVAILABLE, [prefill-1] is lost")
    assert text[title + 4].startswith("  prefill")
    # 10 ms of 170 are two columns.
    assert text[title + 4][18:52].strip() == "xx"


def test_the_places_are_listed_with_what_decided() -> None:
    text = drawn(explained())
    table = [line.split() for line in text[text.index("attempt 2: prefill-0 -> decode-0: OK") + 10 :][1:]]
    assert table[0] == ["place", "cached", "held", "wait", "prefill", "transfer", "ITL", "score", "ms"]
    assert table[1] == [
        *("prefill-0", "->", "decode-0", "64", "32", "1.0", "50.0", "9.0", "12.0", "60.0", "taken")
    ]
    assert table[2] == ["decode-0", "alone", "0", "0", "0.0", "70.0", "0.0", "0.0", "1,070.0"]
    assert " ".join(table[3]) == "prefill-1 -> decode-0 failed this request before"
    assert table[4] == ["and", "2", "more"]


def test_long_decoding_is_cut_off_so_that_the_rest_can_be_seen() -> None:
    proto = explained()
    proto.ended_at_ms = proto.attempts[1].ended_at_ms = 10_000.0
    text = drawn(proto)
    # Everything else ends at 140 ms: the scale ends at 280, and half of the columns are left to decoding.
    assert "280.0 ms" in text[12]
    assert text[20][18:52] == " " * 17 + "#" * 16 + ">"
    assert "9,860.0 ms" in text[20]


@pytest.mark.parametrize(
    ("moments", "last"),
    [
        ({}, ("queue", 0, 80)),
        ({"placed_at_ms": 10.0}, ("reserve", 10, 80)),
        ({"placed_at_ms": 10.0, "reserved_at_ms": 20.0}, ("prefill", 20, 80)),
        ({"reserved_at_ms": 20.0, "first_token_at_ms": 30.0}, ("transfer", 30, 80)),
        ({"first_token_at_ms": 30.0, "committed_at_ms": 40.0}, ("decode queue", 40, 80)),
        ({"committed_at_ms": 40.0, "decoding_at_ms": 50.0}, ("decode", 50, 80)),
    ],
    ids=["queued", "placed", "reserved", "first token", "committed", "decoding"],
)
def test_what_goes_on_ends_at_the_report(moments, last) -> None:
    assert bars(in_flight(**moments))[-1] == last


def test_a_request_in_flight_is_said_to_be_and_may_have_missed_its_objective_already() -> None:
    text = drawn(in_flight())
    assert text[0] == "r, answer 0, at : in flight"
    assert text[3].startswith("no first token yet (objective 50.0 ms missed)")


def test_an_answer_of_one_token_has_no_transfer() -> None:
    proto = explained()
    attempt = proto.attempts[1]
    for name in ("committed_at_ms", "decoding_at_ms"):
        attempt.ClearField(name)
    assert bars(proto)[-1] == ("prefill compute", 60, 100)


def test_a_prompt_computed_where_it_decodes_does_not_travel() -> None:
    proto = good_attempt()
    proto.ClearField("committed_at_ms")
    for candidate in proto.candidates:
        candidate.chosen = candidate.prefill_worker == candidate.decode_worker
    attempt = AttemptExplain.from_proto(proto)
    explain = RouteExplain.from_proto(explained())
    labels = [phase.label for phase in phases_of(attempt, explain)]
    assert labels == ["queue", "reserve", "prefill wait", "prefill compute", "decode queue", "decode"]


def test_a_worker_that_says_nothing_of_its_prefill_gets_one_bar() -> None:
    proto = explained()
    proto.attempts[1].ClearField("prefill")
    assert ("prefill", 40, 100) in bars(proto)
