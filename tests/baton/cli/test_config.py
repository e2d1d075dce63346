"""`baton config show`: what is in force, and who said so."""

from __future__ import annotations

import json

import pytest

FILE = """\
# of the whole team
[router]
placement = "disaggregated"
port = 50061
max_queue = 9

[cluster]
decode = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "baton.toml"
    path.write_text(FILE)
    return path


def shown(baton, *arguments: str) -> dict[str, dict[str, object]]:
    ran = baton("config", "show", "--json", *arguments)
    assert ran.code == 0
    return json.loads(ran.out)


def test_each_value_names_its_source_and_the_first_source_wins(baton, monkeypatch, file) -> None:
    monkeypatch.setenv("BATON_ROUTER_PORT", "50071")
    monkeypatch.setenv("BATON_ROUTER_MAX_QUEUE", "8")
    found = shown(baton, "router", "--config", str(file), "--", "--max-queue=7", "--bucket-edges=10,20")[
        "router"
    ]
    expected = {
        "max_queue": (7, "flag", "--max-queue"),
        "bucket_edges": ([10, 20], "flag", "--bucket-edges"),
        "port": (50071, "environment", "BATON_ROUTER_PORT"),
        "placement": ("disaggregated", "file", f"{file}:3"),
        "admin_port": (50052, "default", ""),
        "model": (None, "missing", ""),
    }
    for name, (value, source, where) in expected.items():
        assert found[name] == {"value": value, "source": source, "where": where, "hidden": False}


def test_the_file_may_come_from_the_environment(baton, monkeypatch, file) -> None:
    monkeypatch.setenv("BATON_CONFIG", str(file))
    found = shown(baton, "cluster", "--changed")
    assert found == {
        "cluster": {"decode": {"value": 3, "source": "file", "where": f"{file}:8", "hidden": False}}
    }


def test_secrets_are_hidden_wherever_they_come_from(baton, monkeypatch) -> None:
    monkeypatch.setenv("BATON_CLUSTER_REDIS_URL", "redis://:hunter2@h:6379/0")
    table = baton("config", "show", "cluster")
    assert "redis_url" in table.out
    assert "(hidden)" in table.out
    as_json = baton("config", "show", "cluster", "--json")
    assert json.loads(as_json.out)["cluster"]["redis_url"] == {
        "value": None, "source": "environment", "where": "BATON_CLUSTER_REDIS_URL", "hidden": True
    }  # fmt: skip
    assert "hunter2" not in table.out + table.err + as_json.out + as_json.err


def test_everybodys_settings_are_shown_without_a_section(baton) -> None:
    found = shown(baton)
    assert set(found) == {"cluster", "router", "prefill", "decode", "pool"}
    assert found["decode"]["lease_ttl_s"]["value"] == 10.0


def test_the_table_has_a_row_per_setting(baton, monkeypatch) -> None:
    monkeypatch.setenv("BATON_ROUTER_PORT", "7")
    lines = {
        line.split()[0]: line.split()[1:]
        for line in baton("config", "show", "router").out.splitlines()
        if line
    }
    assert lines["port"] == ["7", "environment", "BATON_ROUTER_PORT"]
    assert lines["model"] == ["missing;", "it", "must", "be", "set"]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"BATON_ROUTER_PROT": "1"}, "BATON_ROUTER_PROT is unknown"),
        ({"BATON_ROUTER_PORT": "x"}, "'x' is not an integer"),
        ({"BATON_CONFIG": "/no/such/file.toml"}, "cannot be read as TOML"),
    ],
)
def test_a_wrong_setting_is_exit_code_2(baton, monkeypatch, environment, message) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ran = baton("config", "show", "router")
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err


def test_an_unknown_section_names_those_there_are(baton) -> None:
    ran = baton("config", "show", "routers")
    assert ran.code == 2
    assert "'cluster', 'router', 'prefill', 'decode', 'pool'" in ran.err


def test_what_this_install_cannot_load_is_left_out_and_said(baton, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prefill_worker.config", None)
    ran = baton("config", "show", "--json")
    assert ran.code == 0
    assert set(json.loads(ran.out)) == {"cluster", "router", "decode", "pool"}
    assert "note: [prefill] is left out" in ran.err
