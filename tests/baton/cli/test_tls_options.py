"""The options by which the commands reach a cluster with TLS."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_an_authority_is_enough_for_the_public_port(baton, public_router, tls, command) -> None:
    ran = baton(command, "Hi", "--address", public_router.address, "--tls-ca", tls.ca)
    assert (ran.code, ran.out, ran.err) == (0, "Paris is it.\n", "")


def test_the_authority_may_come_from_the_environment(baton, public_router, tls, monkeypatch) -> None:
    monkeypatch.setenv("BATON_TLS_CA", tls.ca)
    assert baton("chat", "Hi", "--address", public_router.address).code == 0


def test_the_admin_port_takes_a_certificate_of_the_cluster(baton, private_router, tls) -> None:
    files = ["--tls-ca", tls.ca, "--tls-cert", tls.cert, "--tls-key", tls.key]
    ran = baton("status", "--json", "--address", private_router.address, *files)
    assert ran.code == 0
    assert '"router": "router-0"' in ran.out


def test_the_admin_port_refuses_others_and_says_what_it_may_want(baton, private_router) -> None:
    ran = baton("status", "--address", private_router.address)
    assert ran.code == 3
    assert "the connection was closed before a word was said; a port with TLS does so" in ran.err


def test_status_with_only_some_of_the_files_names_the_missing_ones(baton, private_router, tls) -> None:
    ran = baton("status", "--address", private_router.address, "--tls-ca", tls.ca)
    assert ran.code == 2
    assert "tls_cert and tls_key are not set" in ran.err


def test_a_file_that_is_not_there_is_a_usage_error(baton, tmp_path) -> None:
    ran = baton("chat", "Hi", "--tls-ca", str(tmp_path / "nothing.pem"))
    assert ran.code == 2
    assert "nothing.pem', which cannot be read: No such file or directory" in ran.err
