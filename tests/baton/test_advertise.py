from __future__ import annotations

import pytest

from baton.advertise import check_advertise
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
    "advertise", ["worker", ":50053", "w:", "w:0", "w:65536", "w:-1", "fd00::7:50053", "0.0.0.0:1", "[::]:1"]
)
def test_anything_else_is_refused_by_name(advertise: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_advertise("127.0.0.1", advertise)
    assert caught.value.field == "advertise"
