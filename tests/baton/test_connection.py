"""Where a client connects to, over what and as whom: arguments, environment, and what fits together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from baton import TlsConfig
from baton.api_keys import ApiKey
from baton.connection import Connection
from baton.errors import ConfigError
from tests.certificates import Authority

KEY = "0123456789abcdef"
LOCAL, ELSEWHERE = "127.0.0.1:1", "router.example.com:1"
DEFAULT = "127.0.0.1:50051"


def resolved(target: Any = None, *, environ: Mapping[str, str] | None = None, **given: Any) -> Connection:
    arguments = {"tls": None, "tls_ca": None, "api_key": None, "insecure_key": False} | given
    return Connection.resolve(target, environ=environ or {}, **arguments)


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    return Authority(tmp_path).path


def test_without_anything_it_is_this_machine_in_plain_text() -> None:
    assert resolved() == Connection(targets=(DEFAULT,), tls=None, api_key=None)


def test_the_environment_says_what_arguments_do_not(ca: Path) -> None:
    environ = {"BATON_ADDRESS": ELSEWHERE, "BATON_API_KEY": KEY, "BATON_TLS_CA": str(ca)}
    found = resolved(environ=environ)
    assert found.targets == (ELSEWHERE,)
    assert isinstance(found.api_key, ApiKey)
    assert found.api_key.secret == KEY
    assert found.tls is not None
    assert found.tls.ca == ca.read_bytes()


def test_the_name_that_certificates_carry_comes_from_the_environment(ca: Path) -> None:
    environ = {"BATON_TLS_SERVER_NAME": "baton.internal"}
    with_ca = resolved(environ={**environ, "BATON_TLS_CA": str(ca)}).tls
    assert with_ca == TlsConfig(ca=ca.read_bytes(), server_name="baton.internal")
    assert resolved(tls=True, environ=environ).tls == TlsConfig(server_name="baton.internal")
    # Without TLS there is nothing to check, and what the caller builds is the caller's.
    assert resolved(environ=environ).tls is None
    assert resolved(tls=TlsConfig(server_name="own"), environ=environ).tls == TlsConfig(server_name="own")


def test_arguments_go_before_the_environment(ca: Path) -> None:
    environ = {"BATON_ADDRESS": ELSEWHERE, "BATON_API_KEY": KEY, "BATON_TLS_CA": "/nowhere"}
    found = resolved([LOCAL], environ=environ, api_key=KEY[::-1], tls_ca=ca)
    assert found.targets == (LOCAL,)
    assert isinstance(found.api_key, ApiKey)
    assert found.api_key.secret == KEY[::-1]
    assert found.tls == TlsConfig(ca=ca.read_bytes())
    assert resolved(LOCAL, environ=environ, tls=False).tls is None
    assert resolved(LOCAL, environ=environ, tls=TlsConfig(server_name="a")).tls == TlsConfig(server_name="a")


def test_an_empty_variable_says_nothing() -> None:
    environ = dict.fromkeys(("BATON_ADDRESS", "BATON_API_KEY", "BATON_TLS_CA"), "")
    assert resolved(environ=environ) == resolved()


@pytest.mark.parametrize(
    ("targets", "given", "is_encrypted"),
    [
        ([LOCAL], {}, False),
        ([ELSEWHERE], {}, False),
        ([LOCAL], {"api_key": KEY}, False),
        ([ELSEWHERE], {"api_key": KEY}, True),
        ([ELSEWHERE], {"api_key": lambda: KEY}, True),
        ([LOCAL, ELSEWHERE], {"api_key": KEY}, True),
        ([ELSEWHERE], {"api_key": KEY, "insecure_key": True}, False),
        ([ELSEWHERE], {"api_key": KEY, "insecure_key": True, "tls": True}, True),
        ([ELSEWHERE], {"api_key": KEY, "insecure_key": True, "tls": False}, False),
        ([LOCAL], {"tls": True}, True),
        ([LOCAL], {"tls": TlsConfig()}, True),
        ([LOCAL], {"api_key": KEY, "tls": False}, False),
    ],
)
def test_a_key_that_leaves_this_machine_turns_tls_on(
    targets: list[str], given: dict[str, Any], is_encrypted: bool
) -> None:
    assert resolved(targets, **given).tls == (TlsConfig() if is_encrypted else None)


@pytest.mark.parametrize(
    ("target", "given", "field"),
    [
        ("router", {}, "target"),
        ([LOCAL, "router"], {}, "target"),
        ([], {}, "target"),
        (None, {"environ": {"BATON_ADDRESS": "router"}}, "target"),
        (LOCAL, {"api_key": "short"}, "api_key"),
        (LOCAL, {"environ": {"BATON_API_KEY": "short"}}, "api_key"),
        (ELSEWHERE, {"api_key": KEY, "tls": False}, "api_key"),
        (LOCAL, {"tls": "ca.pem"}, "tls"),
        (LOCAL, {"tls_ca": "/nowhere.pem"}, "tls_ca"),
        (LOCAL, {"environ": {"BATON_TLS_CA": "/nowhere.pem"}}, "tls_ca"),
        (LOCAL, {"tls_ca": "a.pem", "tls": False}, "tls_ca"),
        (LOCAL, {"tls_ca": "a.pem", "tls": TlsConfig()}, "tls_ca"),
    ],
)
def test_what_cannot_be_used_is_named(target: Any, given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolved(target, **given)
    assert error.value.field == field
    assert KEY not in error.value.message


def test_nothing_shows_the_key() -> None:
    assert KEY not in repr(resolved(LOCAL, api_key=KEY))
