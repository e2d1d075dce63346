from __future__ import annotations

import pytest

from baton.config import load_config
from baton.errors import ConfigError
from baton.pool.config import PoolConfig


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("decode", {"decode": -1}),
        ("decode", {"decode": 0}),
        ("decode", {"decode": 1_025}),
        ("prefill", {"prefill": -1}),
        ("strategy", {"strategy": "NEAR"}),
        ("ray_dir", {"ray_dir": "/tmp/" + "x" * 26}),
        ("unhealthy_s", {"unhealthy_s": 0.0}),
        ("start_timeout_s", {"start_timeout_s": 0.0}),
        ("placement_timeout_s", {"placement_timeout_s": 0.0}),
        ("keep_workers", {"keep_workers": True}),
        ("decode_cpus", {"decode_cpus": 0.0, "ray_address": "10.0.0.1:6379"}),
        ("decode_gpus", {"decode_gpus": 1.5}),
        ("prefill_cpus", {"prefill_cpus": -1.0}),
        ("decode_resources", {"decode_resources": ("seat",)}),
        ("decode_resources", {"decode_resources": ("seat=many",)}),
        ("prefill_node_labels", {"prefill_node_labels": ("=a",)}),
    ],
)
def test_a_bad_value_names_its_field(field, values) -> None:
    with pytest.raises(ConfigError) as caught:
        PoolConfig(**values)
    assert caught.value.field == field


def test_a_ray_folder_leaves_room_for_rays_longest_socket() -> None:
    folder = "/tmp/" + "x" * 25
    longest = f"{folder}/session_2026-11-30_01-16-32_853451_4194304/sockets/plasma_store"
    assert PoolConfig(ray_dir=folder).ray_dir == folder
    # Linux takes 107 bytes for a socket's path.
    assert len(longest) <= 107


def test_on_a_local_ray_a_worker_asks_for_a_slot_and_on_a_cluster_for_a_cpu() -> None:
    assert PoolConfig().ask("decode").resources == {"baton_decode": 1.0}
    assert PoolConfig().ask("prefill").resources == {"baton_prefill": 1.0}
    assert PoolConfig(ray_address="10.0.0.1:6379").ask("decode").resources == {"CPU": 1.0}


@pytest.mark.parametrize(
    ("settings", "when_asked", "otherwise"),
    [
        ({}, False, False),
        ({"ray_address": "10.0.0.1:6379"}, False, True),
        ({"ray_address": "10.0.0.1:6379", "keep_workers": True}, True, True),
    ],
)
def test_workers_of_a_cluster_outlive_a_pool_that_fails(
    settings, *, when_asked: bool, otherwise: bool
) -> None:
    config = PoolConfig(**settings)
    assert config.leaves_workers(is_asked=True) is when_asked
    assert config.leaves_workers(is_asked=False) is otherwise


def test_each_role_has_needs_of_its_own() -> None:
    flags = [
        "--ray-address=10.0.0.1:6379",
        "--decode-cpus=2",
        "--decode-gpus=0.5",
        "--decode-resources=seat=1,fast_disk=0.25",
        '--decode-node-labels=["zone=in(a,b)"]',
        "--prefill-node-labels=zone=c",
    ]
    config = load_config(PoolConfig, section="pool", argv=flags, environ={})
    decode, prefill = config.ask("decode"), config.ask("prefill")
    assert decode.resources == {"CPU": 2.0, "GPU": 0.5, "seat": 1.0, "fast_disk": 0.25}
    assert decode.labels == {"zone": "in(a,b)"}
    assert str(decode) == "CPU 2, GPU 0.5, seat 1, fast_disk 0.25"
    assert (prefill.resources, prefill.labels) == ({"CPU": 1.0}, {"zone": "c"})


def test_the_file_of_all_roles_may_have_a_table_for_the_pool(tmp_path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text('[pool]\ndecode = 3\nstrategy = "SPREAD"\n[router]\nname = "r"\n')
    config = load_config(PoolConfig, section="pool", argv=["--config", str(file)], environ={})
    assert (config.decode, config.strategy) == (3, "SPREAD")
