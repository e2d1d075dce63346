from __future__ import annotations

import json

import pytest

from baton.cli import fleet_wait
from baton.errors import InvalidRequest
from baton.v1 import common_pb2
from baton.v1.pool_service_pb2 import ScaleRequest, ScaleResponse
from tests.baton.cli.fake_control import worker

DECODE = common_pb2.ROLE_DECODE


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_wait, "POLL_S", 0.005)


def test_it_waits_until_those_that_are_added_serve(baton, control) -> None:
    control.scaled = ScaleResponse(added=["decode-1"])
    first = worker("decode-0")
    control.lists = [
        [first, worker("decode-1", "PLACING")],
        [first, worker("decode-1", "STARTING")],
        [first, worker("decode-1")],
    ]
    ran = baton("scale", "--decode", "2", "--address", control.address)
    assert (ran.code, ran.out) == (0, "starting decode-1\n2 decode workers serving\n")
    assert control.asked == [ScaleRequest(role=DECODE, num_workers=2)]
    said = [line.partition(" (0 s)")[0] for line in ran.err.splitlines()]
    assert said == ["waiting for decode-1 (placing)", "waiting for decode-1 (starting)"]


def test_and_until_those_that_are_too_many_are_gone(baton, control) -> None:
    control.scaled = ScaleResponse(removed=["decode-1"])
    control.lists = [[worker("decode-0"), worker("decode-1", "DRAINING")], [worker("decode-0")]]
    ran = baton("scale", "--decode", "1", "--address", control.address)
    assert (ran.code, ran.out) == (0, "draining decode-1\n1 decode worker serving\n")


def test_the_other_role_is_not_waited_for(baton, control) -> None:
    control.lists = [[worker("decode-0"), worker("prefill-0", "RESTARTING")]]
    ran = baton("scale", "--decode", "1", "--address", control.address)
    assert (ran.code, ran.out) == (0, "decode: 1 already\n1 decode worker serving\n")


def test_both_roles_at_once(baton, control) -> None:
    control.lists = [[worker("decode-0"), worker("prefill-0"), worker("prefill-1")]]
    ran = baton("scale", "--decode", "1", "--prefill", "2", "--address", control.address)
    assert ran.code == 0
    assert [(request.role, request.num_workers) for request in control.asked] == [
        (common_pb2.ROLE_PREFILL, 2),
        (DECODE, 1),
    ]


def test_no_wait_asks_and_leaves(baton, control) -> None:
    control.scaled = ScaleResponse(added=["decode-1"])
    control.lists = [[worker("decode-1", "PLACING")]]
    ran = baton("scale", "--decode", "2", "--no-wait", "--address", control.address)
    assert (ran.code, ran.out, ran.err) == (0, "starting decode-1\n", "")


def test_one_that_is_given_up_ends_the_wait(baton, control) -> None:
    control.lists = [[worker("decode-0"), worker("decode-1", "FAILED", reason="no room for its KV")]]
    ran = baton("scale", "--decode", "2", "--address", control.address)
    assert ran.code == 1
    assert "decode-1 is given up: no room for its KV" in ran.err


def test_a_wait_that_is_too_long_says_what_for(baton, control) -> None:
    control.lists = [[worker("decode-1", "PLACING", reason="no node has a GPU")]]
    ran = baton("scale", "--decode", "2", "--timeout-s", "0.1", "--address", control.address)
    assert ran.code == 1
    assert "not done within 0.1 s: decode-1 (placing); decode-1: no node has a GPU" in ran.err


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_number_that_is_refused_is_a_usage_error_of_that_option(baton, control, role) -> None:
    control.refusal = InvalidRequest("num_workers is 65; it must be 1 to 64", field="num_workers")
    ran = baton("scale", f"--{role}", "65", "--address", control.address)
    assert (ran.code, ran.err) == (2, f"error: --{role} is 65; it must be 1 to 64\n")


def test_the_help_says_how_many_there_may_be(baton) -> None:
    assert "1 to 64 on one machine" in baton("scale", "--help").out


def test_json_names_all_that_are_added_and_removed_once_it_is_done(baton, control) -> None:
    control.scaled = ScaleResponse(added=["decode-1"])
    control.lists = [[worker("decode-1", "PLACING")], [worker("decode-1")]]
    flags = ["--decode", "2", "--prefill", "1", "--json"]
    ran = baton("scale", *flags, "--address", control.address)
    # The same answer to both questions.
    assert (ran.code, json.loads(ran.out)) == (0, {"added": ["decode-1", "decode-1"], "removed": []})
    assert len(control.lists) == 1


@pytest.mark.parametrize("flags", [[], ["--decode", "0"]])
def test_a_number_must_be_given(baton, control, flags) -> None:
    ran = baton("scale", *flags, "--address", control.address)
    assert ran.code == 2
    assert control.asked == []


def test_while_it_waits_it_says_why_one_does_not_serve(baton, control) -> None:
    control.lists = [
        [worker("decode-1", "UNHEALTHY", reason="num_layers differs")],
        [worker("decode-0"), worker("decode-1")],
    ]
    ran = baton("scale", "--decode", "2", "--address", control.address)
    assert ran.code == 0
    assert "waiting for decode-1 (unhealthy); decode-1: num_layers differs" in ran.err
