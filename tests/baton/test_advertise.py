from __future__ import annotations

import pytest

from baton.advertise import advertised, check_advertise, is_shareable
from baton.errors import ConfigError
from decode_worker.config import DecodeConfig
from prefill_worker.config import PrefillConfig

CONFIGS = (PrefillConfig, DecodeConfig)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "0:0:0:0:0:0:0:0", ""])
def test_a_wildcard_host_alone_is_refused_with_the_remedy(config, host: str) -> None:
    with pytest.raises(ConfigError, match="set advertise to the host:port") as caught:
        config(model="m", host=host)
    assert caught.value.field == "host"


@pytest.mark.parametrize("config", CONFIGS)
def test_a_wildcard_host_with_an_address_to_announce_is_taken(config) -> None:
    assert config(model="m", host="0.0.0.0", advertise="10.0.0.7:50053").advertise == "10.0.0.7:50053"


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.7", "::1", "worker-0.pool"])
def test_a_host_that_can_be_dialled_needs_no_other(host: str) -> None:
    check_advertise(host, "")


@pytest.mark.parametrize("advertise", ["w:1", "worker-0.pool:65535", "[fd00::7]:50053"])
def test_an_address_is_a_host_and_a_port(advertise: str) -> None:
    check_advertise("0.0.0.0", advertise)


@pytest.mark.parametrize(
    ("advertise", "address"),
    [
        ("127.0.0.2:{port}", "127.0.0.2:4711"),
        ("{name}.pool:50053", "decode-1.pool:50053"),
        ("[fd00::7]:{port}", "[fd00::7]:4711"),
        ("{name}.{name}:{port}", "decode-1.decode-1:4711"),
        ("10.0.0.7:50053", "10.0.0.7:50053"),
        ("", ""),
    ],
)
def test_the_bound_port_and_the_name_are_filled_in(advertise: str, address: str) -> None:
    check_advertise("127.0.0.1", advertise)
    assert advertised(advertise, name="decode-1", port=4711) == address


def test_only_an_address_with_a_place_to_fill_in_is_for_several_workers() -> None:
    shared = {text: is_shareable(text) for text in ("", "10.0.0.7:50053", "127.0.0.2:{port}", "{name}:1")}
    assert shared == {"": True, "10.0.0.7:50053": False, "127.0.0.2:{port}": True, "{name}:1": True}


@pytest.mark.parametrize(
    "advertise",
    [
        "{pod}:1",
        "w:{name}",
        "w:1{port}x",
        "{port}",
        "worker",
        ":50053",
        "w:",
        "w:0",
        "w:65536",
        "w:-1",
        "fd00::7:50053",
        "0.0.0.0:1",
        "[::]:1",
    ],
)
def test_anything_else_is_refused_by_name(advertise: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_advertise("127.0.0.1", advertise)
    assert caught.value.field == "advertise"
