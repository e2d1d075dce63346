"""`baton workers`, and what every command of the control port does where that does not answer."""

from __future__ import annotations

import json

import pytest

from baton.cli.worker_words import duration
from baton.v1.pool_service_pb2 import PoolWorker
from tests.baton.cli.fake_control import worker

COMMANDS = [("workers",), ("scale", "--decode=2"), ("drain", "decode-0")]


def test_the_table_has_a_row_per_worker_and_the_reasons_come_below(baton, control) -> None:
    control.lists = [
        [worker("decode-0", runner="ray"), worker("prefill-0", "RESTARTING", pid=0, reason="was killed")]
    ]
    control.dashboard_url = "http://127.0.0.1:8265"
    ran = baton("workers", "--address", control.address)
    assert ran.code == 0
    rows = {line.split()[0]: line.split() for line in ran.out.splitlines() if line.strip()}
    titles, decode, prefill = (" ".join(rows[name]) for name in ("name", "decode-0", "prefill-0"))
    assert titles == "name role state runner node pid restarts attempts since"
    assert decode == "decode-0 decode serving ray 127.0.0.1 100 2 3 61 s"
    assert prefill == "prefill-0 prefill restarting process 127.0.0.1 - 2 3 61 s"
    assert "note: prefill-0 restarting: was killed" in ran.out
    assert "Ray dashboard: http://127.0.0.1:8265" in ran.out


def test_releases_are_noted_while_they_differ(baton, control) -> None:
    names = {"decode-0": "0.1.0", "decode-1": "0.2.0", "decode-2": "0.1.0", "decode-3": ""}
    control.lists = [[worker(name, release=release) for name, release in names.items()]]
    lines = baton("workers", "--address", control.address).out.splitlines()
    assert [line for line in lines if "release" in line] == [
        "note: release 0.1.0 is run by decode-0, decode-2",
        "note: release 0.2.0 is run by decode-1",
    ]
    control.lists = [[worker(name, release="0.1.0") for name in names]]
    assert "release" not in baton("workers", "--address", control.address).out


def test_a_silent_ray_is_noted(baton, control) -> None:
    control.ray_silent_ms = 12_000
    assert "has not answered for 12 s" in baton("workers", "--address", control.address).out


def test_json_holds_every_field_with_roles_and_states_as_words(baton, control) -> None:
    control.lists = [[worker("decode-0", "UNHEALTHY", reason="[no step]")]]
    shown = json.loads(baton("workers", "--json", "--address", control.address).out)
    (only,) = shown["workers"]
    assert set(only) == {field.name for field in PoolWorker.DESCRIPTOR.fields}
    assert (only["role"], only["state"], only["reason"]) == ("decode", "unhealthy", "[no step]")
    assert (only["pid"], only["since_ms"]) == (100, 61_000)
    assert (shown["dashboard_url"], shown["ray_silent_ms"]) == ("", 0)


@pytest.mark.parametrize("columns", [40, 80])
def test_a_narrow_terminal_cuts_nothing_short(baton, control, columns) -> None:
    control.lists = [[worker("decode-0")]]
    assert "…" not in baton("workers", "--address", control.address, columns=columns).out


@pytest.mark.parametrize("command", COMMANDS)
def test_nobody_there_is_exit_code_3_with_a_remedy(baton, command) -> None:
    ran = baton(*command, "--address", "127.0.0.1:1")
    assert (ran.code, ran.out) == (3, "")
    assert "no control port answers at 127.0.0.1:1; `baton up` serves one" in ran.err


@pytest.mark.parametrize("command", COMMANDS)
def test_another_port_is_exit_code_3_and_named(baton, router, command) -> None:
    ran = baton(*command, "--address", router.address)
    assert ran.code == 3
    assert f"{router.address} is not a control port; by default that is 127.0.0.1:50053" in ran.err


def test_the_address_may_come_from_the_environment(baton, control, monkeypatch) -> None:
    monkeypatch.setenv("BATON_CONTROL_ADDRESS", control.address)
    assert baton("workers").code == 0


def test_with_tls_it_takes_a_certificate_of_the_cluster(baton, private_control, tls) -> None:
    files = ["--tls-ca", tls.ca, "--tls-cert", tls.cert, "--tls-key", tls.key]
    assert baton("workers", "--address", private_control.address, *files).code == 0
    ran = baton("workers", "--address", private_control.address)
    assert ran.code == 3
    assert "a port with TLS does so" in ran.err


def test_durations_are_told_in_one_unit() -> None:
    told = [duration(seconds * 1000) for seconds in (0, 119, 120, 7199, 7200)]
    assert told == ["0 s", "119 s", "2 min", "119 min", "2 h"]
