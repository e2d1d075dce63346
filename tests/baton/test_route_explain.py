from __future__ import annotations

import dataclasses

from baton.answer import Summary
from baton.route_explain import RouteExplain
from baton.v1 import common_pb2, inference_service_pb2, route_explain_pb2


def test_what_has_not_come_is_none_and_zero_is_zero() -> None:
    attempt = route_explain_pb2.AttemptExplain(number=1, placed_at_ms=0.0)
    proto = route_explain_pb2.RouteExplain(request_id="req-1", ended_at_ms=4.5, attempts=[attempt])
    explain = RouteExplain.from_proto(proto)
    assert (explain.first_token_at_ms, explain.ended_at_ms) == (None, 4.5)
    assert (explain.attempts[0].placed_at_ms, explain.attempts[0].reserved_at_ms) == (0.0, None)
    assert (explain.attempts[0].prefill, explain.attempts[0].place) == (None, None)


def test_the_place_is_the_candidate_that_was_chosen() -> None:
    candidates = [
        route_explain_pb2.Candidate(prefill_worker="p", decode_worker="d"),
        route_explain_pb2.Candidate(prefill_worker="d", decode_worker="d", chosen=True),
    ]
    attempt = route_explain_pb2.AttemptExplain(candidates=candidates)
    (read,) = RouteExplain.from_proto(route_explain_pb2.RouteExplain(attempts=[attempt])).attempts
    assert [candidate.is_local for candidate in read.candidates] == [False, True]
    assert read.place is read.candidates[1]


def test_a_priority_that_is_not_named_is_normal() -> None:
    for priority, name in ((0, "normal"), (common_pb2.PRIORITY_LOW, "low"), (3, "high")):
        assert RouteExplain.from_proto(route_explain_pb2.RouteExplain(priority=priority)).priority == name


def test_a_summary_explains_its_first_answer_in_plain_values() -> None:
    proto = inference_service_pb2.Summary(
        explain=route_explain_pb2.RouteExplain(request_id="req-1", regret_ms=3)
    )
    summary = Summary.from_proto(proto)
    assert (summary.explain.request_id, summary.explain.regret_ms) == ("req-1", 3.0)
    assert dataclasses.asdict(summary)["explain"]["attempts"] == ()
