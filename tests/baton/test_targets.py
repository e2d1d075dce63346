"""Addresses: what is one, and what is wrong with another."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import ConfigError
from baton.targets import check_target


@pytest.mark.parametrize(
    "target",
    ["127.0.0.1:50051", "router:1", "a.b-c:65535", "[::1]:50051", "[fe80::1%eth0]:1", "dns:///router:1",
     "dns:router", "ipv4:10.0.0.1:1,10.0.0.2:1", "unix:/run/baton"],
)  # fmt: skip
def test_an_address_is_taken_as_it_is(target: str) -> None:
    assert check_target(target) == target


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("router", "has no port; write host:port"),
        ("[::1]", "has no port"),
        ("", "is not host:port"),
        (":50051", "is not host:port"),
        ("router:", "is not host:port"),
        ("router:0", "is not host:port"),
        ("router:65536", "is not host:port"),
        ("router:٣", "is not host:port"),
        ("::1:50051", "is not host:port"),
        ("http://router:50051", "is not host:port"),
        ("router:50051/v1", "is not host:port"),
        ("a router:50051", "is not host:port"),
        (50051, "is not text"),
    ],
)
def test_what_is_none_is_named(target: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as error:
        check_target(target)
    assert error.value.field == "target"
    assert repr(target) in error.value.message
