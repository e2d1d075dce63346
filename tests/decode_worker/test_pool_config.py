from __future__ import annotations

import pytest

from baton.errors import ConfigError
from decode_worker.pool_config import PoolConfig


@pytest.mark.parametrize(
    ("field", "value"), [("workers", 0), ("placement", "NEAR"), ("ray_dir", "/tmp/" + "x" * 26)]
)
def test_a_bad_value_names_its_field(field, value) -> None:
    with pytest.raises(ConfigError) as caught:
        PoolConfig(model="m", **{field: value})
    assert caught.value.field == field


def test_a_ray_folder_leaves_room_for_rays_longest_socket() -> None:
    folder = "/tmp/" + "x" * 25
    longest = f"{folder}/session_2026-11-30_01-16-32_853451_4194304/sockets/plasma_store"
    assert PoolConfig(model="m", ray_dir=folder).ray_dir == folder
    # Linux takes 107 bytes for a socket's path.
    assert len(longest) <= 107


def test_workers_of_a_pool_do_not_share_one_announced_address() -> None:
    with pytest.raises(ConfigError) as caught:
        PoolConfig(model="m", workers=2, advertise="10.0.0.7:50053")
    assert caught.value.field == "advertise"
    assert PoolConfig(model="m", workers=1, advertise="10.0.0.7:50053").advertise == "10.0.0.7:50053"
