from __future__ import annotations

import json

from baton.v1 import admin_service_pb2, route_explain_pb2
from tests.baton.cli.explained import explained


def answers(*protos: route_explain_pb2.RouteExplain) -> admin_service_pb2.GetRouteExplainResponse:
    return admin_service_pb2.GetRouteExplainResponse(answers=protos)


def test_a_request_is_drawn_in_plain_text_where_no_terminal_is(baton, router) -> None:
    router.explained["req-7"] = answers(explained())
    ran = baton("explain", "req-7", "--address", router.address)
    assert (ran.code, ran.err) == (0, "")
    assert "\x1b" not in ran.out
    assert "req-7, answer 0, at router-0: OK" in ran.out
    assert "UNAVAILABLE, [prefill-1] is lost" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 100


def test_without_an_id_the_last_request_is_shown(baton, router) -> None:
    router.explained[""] = answers(explained())
    assert "req-7" in baton("explain", "--address", router.address).out


def test_several_answers_are_shown_one_after_another(baton, router) -> None:
    second = explained()
    second.sample_index = 1
    router.explained["req-7"] = answers(explained(), second)
    out = baton("explain", "req-7", "--address", router.address).out
    assert 0 <= out.index("answer 0") < out.index("answer 1")


def test_json_has_every_field_of_the_message(baton, router) -> None:
    router.explained["req-7"] = answers(explained())
    ran = baton("explain", "req-7", "--address", router.address, "--json")
    (answer,) = json.loads(ran.out)["answers"]
    assert set(answer) == set(route_explain_pb2.RouteExplain.DESCRIPTOR.fields_by_name)
    lost, good = answer["attempts"]
    assert set(lost) == set(route_explain_pb2.AttemptExplain.DESCRIPTOR.fields_by_name)
    assert (answer["priority"], lost["first_token_at_ms"], lost["prefill"]) == ("high", None, None)
    assert good["prefill"]["num_steps"] == 3
    assert set(good["candidates"][0]) == set(route_explain_pb2.Candidate.DESCRIPTOR.fields_by_name)


def test_an_unknown_request_is_wrong_usage_and_says_what_to_do(baton, router) -> None:
    ran = baton("explain", "req-9", "--address", router.address)
    assert ran.code == 2
    assert ran.err.startswith("error: no request 'req-9' here; another router may have had it: --address")


def test_nothing_at_the_address_cannot_be_reached(baton) -> None:
    ran = baton("explain", "req-7", "--address", "127.0.0.1:1")
    assert (ran.code, "no router's admin port answers" in ran.err) == (3, True)
