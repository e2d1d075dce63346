"""What is asked before a worker is removed, and of whom."""

from __future__ import annotations

import json

import pytest

from baton.v1.pool_service_pb2 import DrainResponse, ScaleResponse
from tests.baton.cli.fake_control import worker

DRAIN = ("drain", "decode-0", "--no-wait")


@pytest.fixture
def drained(control):
    control.drained = DrainResponse(worker=worker("decode-0"), num_others=1, grace_ms=1000)
    return control


@pytest.fixture
def at_terminal(monkeypatch):
    """Somebody sits there and types `answer`."""

    def sit(answer: bool) -> list[str]:
        asked: list[str] = []

        def confirm(question: str, **_options: object) -> bool:
            asked.append(question)
            if not answer:
                raise __import__("typer").Abort
            return True

        monkeypatch.setattr("baton.cli.confirm.must_ask", lambda *, yes: not yes)
        monkeypatch.setattr("baton.cli.drain.must_ask", lambda *, yes: not yes)
        monkeypatch.setattr("baton.cli.scale.must_ask", lambda *, yes: not yes)
        monkeypatch.setattr("typer.confirm", confirm)
        return asked

    return sit


def test_a_script_is_not_asked(baton, drained) -> None:
    assert baton(*DRAIN, "--address", drained.address).code == 0
    assert [(request.name, request.dry_run) for request in drained.asked] == [("decode-0", False)]


@pytest.mark.parametrize("answer", [True, False])
def test_a_person_is_told_and_asked_before_a_drain(baton, drained, at_terminal, answer) -> None:
    asked = at_terminal(answer)
    ran = baton(*DRAIN, "--address", drained.address)
    assert (ran.code, asked) == (0 if answer else 1, ["Drain decode-0?"])
    assert "holds 3 attempts" in ran.err
    assert [request.dry_run for request in drained.asked] == ([True, False] if answer else [True])


@pytest.mark.parametrize("option", ["--yes", "--dry-run"])
def test_nobody_is_asked_who_has_said_so(baton, drained, at_terminal, option) -> None:
    asked = at_terminal(answer=False)
    assert baton(*DRAIN, option, "--address", drained.address).code == 0
    assert asked == []


def test_scaling_down_is_asked_and_scaling_up_is_not(baton, control, at_terminal) -> None:
    control.lists = [[worker("decode-0"), worker("decode-1"), worker("prefill-0")]]
    control.scaled = ScaleResponse()
    asked = at_terminal(answer=False)
    up = baton("scale", "--decode", "3", "--prefill", "1", "--no-wait", "--address", control.address)
    assert (up.code, asked, len(control.asked)) == (0, [], 2)
    down = baton("scale", "--decode", "1", "--no-wait", "--address", control.address)
    assert (down.code, asked, len(control.asked)) == (1, ["Remove them?"], 2)
    assert "decode: 2 now; would drain and remove 1 worker" in down.err


def test_a_dry_run_of_scale_does_nothing(baton, control) -> None:
    control.lists = [[worker("decode-0"), worker("decode-1", "DRAINING"), worker("prefill-0")]]
    options = ["scale", "--decode", "3", "--prefill", "1", "--dry-run", "--address", control.address]
    ran = baton(*options)
    assert ran.code == 0
    assert "decode: 1 now; would start 2 workers" in ran.out
    assert "prefill: 1 already" in ran.out
    found = json.loads(baton(*options, "--json").out)
    assert found["planned"][1] == {"role": "decode", "num_now": 1, "num_workers": 3}
    assert control.asked == []
