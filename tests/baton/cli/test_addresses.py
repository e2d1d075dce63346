"""What every command says of an address that cannot be one, or is somebody else's."""

from __future__ import annotations

import pytest
import typer

from baton.cli.options import check_address

COMMANDS = [
    ("status",),
    ("explain",),
    ("workers",),
    ("scale", "--decode=2"),
    ("drain", "decode-0"),
    ("chat", "Hi"),
    ("generate", "Hi"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
@pytest.mark.parametrize(
    ("address", "why"), [("foo", "which has no port; write host:port"), ("127.0.0.1:99999", "host:port")]
)
def test_what_is_no_address_is_a_usage_error(baton, command, address, why) -> None:
    ran = baton(*command, "--address", address)
    assert (ran.code, ran.out) == (2, "")
    said = " ".join(ran.err.replace("│", " ").split())
    assert f"address is '{address}', which" in said
    assert why in said


@pytest.mark.parametrize("command", [("chat", "Hi"), ("generate", "Hi")], ids=lambda words: words[0])
def test_the_control_port_is_no_router(baton, control, command) -> None:
    ran = baton(*command, "--address", control.address)
    assert (ran.code, ran.out) == (3, "")
    assert "nobody serves this call at that address" in ran.err


@pytest.mark.parametrize("command", COMMANDS[:-2], ids=lambda words: words[0])
def test_a_port_of_another_kind_counts_as_nothing_there(baton, router, control, command) -> None:
    other = control if command[0] in ("status", "explain") else router
    ran = baton(*command, "--address", other.address)
    assert (ran.code, ran.out) == (3, "")
    assert f"{other.address} is not a" in ran.err


@pytest.mark.parametrize("address", ["a:1", "10.0.0.7:65535", "[::1]:50051", "router.ns.svc:50051"])
def test_host_and_port(address: str) -> None:
    assert check_address(address) == address


@pytest.mark.parametrize("name", ["dns:///baton-router:50051", "unix:/run/baton.sock", "ipv4:10.0.0.7:1"])
def test_names_of_grpcs_own_schemes_are_left_to_it(name: str) -> None:
    assert check_address(name) == name


@pytest.mark.parametrize(
    "address",
    ["", ":1", "a:", "a:0", "a:65536", "a:-1", "a:x", "::1:50051", "http://a:1", "a b:1", "a:\u0661"],
)
def test_what_is_neither(address: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not host:port"):
        check_address(address)
