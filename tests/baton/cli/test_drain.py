from __future__ import annotations

import json

import pytest

from baton.cli import fleet_wait
from baton.errors import InvalidRequest
from baton.v1.pool_service_pb2 import DrainRequest, DrainResponse
from tests.baton.cli.fake_control import worker


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_wait, "POLL_S", 0.005)


def test_it_says_what_the_worker_holds_and_waits_until_it_is_gone(baton, control) -> None:
    leaving = worker("decode-1", runner="ray")
    control.drained = DrainResponse(worker=leaving, num_others=1, grace_ms=15_000)
    control.lists = [[worker("decode-0"), worker("decode-1", "DRAINING")], [worker("decode-0")]]
    ran = baton("drain", "decode-1", "--address", control.address)
    assert ran.code == 0
    assert ran.out.splitlines() == [
        "decode-1 (Ray actor, process 100 on 127.0.0.1) is serving and holds 3 attempts",
        "1 other decode worker serving; it is gone within 15 s at most",
        "decode-1 is gone",
    ]
    assert ran.err.startswith("waiting for decode-1 (draining)")
    assert control.asked == [DrainRequest(name="decode-1")]


def test_a_new_worker_of_its_name_is_not_waited_for(baton, control) -> None:
    control.drained = DrainResponse(worker=worker("decode-1"), num_others=1, grace_ms=15_000)
    control.lists = [[worker("decode-1", pid=101)]]
    assert baton("drain", "decode-1", "--address", control.address).out.endswith("decode-1 is gone\n")


def test_a_dry_run_only_tells(baton, control) -> None:
    control.drained = DrainResponse(worker=worker("decode-0"), grace_ms=15_000)
    control.lists = [[worker("decode-0")]]
    ran = baton("drain", "decode-0", "--dry-run", "--address", control.address)
    # Exit code 2, as without --dry-run: it is the last.
    assert (ran.code, ran.err) == (2, "")
    assert ran.out.splitlines()[1:] == [
        "0 other decode workers serving; it is gone within 15 s at most",
        "nothing was done; it would need --force",
    ]
    assert control.asked == [DrainRequest(name="decode-0", dry_run=True)]
    forced = baton("drain", "decode-0", "--dry-run", "--force", "--address", control.address)
    assert (forced.code, forced.out.splitlines()[-1]) == (0, "nothing was done")


def test_force_and_no_wait_are_passed_on(baton, control) -> None:
    control.drained = DrainResponse(worker=worker("decode-0", pid=0))
    ran = baton("drain", "decode-0", "--force", "--no-wait", "--address", control.address)
    assert ran.code == 0
    assert "(no process)" in ran.out
    assert control.asked == [DrainRequest(name="decode-0", force=True)]


def test_the_last_of_a_role_is_refused_as_it_is_said(baton, control) -> None:
    control.refusal = InvalidRequest("no other decode worker serves", field="force")
    ran = baton("drain", "decode-0", "--address", control.address)
    assert (ran.code, ran.out) == (2, "")
    assert "no other decode worker serves" in ran.err


def test_a_name_must_be_given(baton) -> None:
    assert baton("drain").code == 2


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_json_is_the_answer_once_it_is_done(baton, control, flags) -> None:
    control.drained = DrainResponse(worker=worker("decode-1"), num_others=1, grace_ms=15_000)
    control.lists = [[worker("decode-0"), worker("decode-1", "DRAINING")], [worker("decode-0")]]
    ran = baton("drain", "decode-1", "--json", *flags, "--address", control.address)
    shown = json.loads(ran.out)
    assert (ran.code, shown["num_others"], shown["grace_ms"]) == (0, 1, 15_000)
    known = shown["worker"]
    assert (known["name"], known["role"], known["state"]) == ("decode-1", "decode", "serving")
    assert len(control.lists) == (2 if flags else 1)


def test_the_wait_can_be_shortened(baton, control) -> None:
    control.drained = DrainResponse(worker=worker("decode-1"), num_others=1, grace_ms=900_000)
    control.lists = [[worker("decode-1", "DRAINING")]]
    ran = baton("drain", "decode-1", "--json", "--timeout-s", "0.1", "--address", control.address)
    assert (ran.code, ran.out) == (1, "")
    assert "not done within 0.1 s: decode-1 (draining)" in ran.err
