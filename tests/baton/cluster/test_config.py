from __future__ import annotations

import pytest

from baton.cluster import config as cluster_config
from baton.cluster.config import ClusterConfig
from baton.errors import ConfigError


@pytest.mark.parametrize(
    ("cores", "prefill", "decode", "threads"),
    [(2, 1, 1, 1), (1, 1, 1, 1), (8, 1, 1, 4), (8, 1, 2, 2), (64, 2, 2, 16)],
)
def test_workers_share_the_usable_cores(monkeypatch, cores, prefill, decode, threads) -> None:
    monkeypatch.setattr(cluster_config, "usable_cores", lambda: cores)
    assert ClusterConfig(prefill=prefill, decode=decode).num_threads == threads


def test_given_threads_win() -> None:
    assert ClusterConfig(threads=7).num_threads == 7


def test_the_workers_that_must_be_ready() -> None:
    assert ClusterConfig(prefill=2, decode=1).worker_names == {"prefill-0", "prefill-1", "decode-0"}


@pytest.mark.parametrize(
    ("placement", "prefill", "num_prefill"),
    [
        (None, None, 1),
        ("auto", None, 1),
        ("disaggregated", 2, 2),
        ("colocated", None, 0),
        ("colocated", 0, 0),
        ("colocated", 2, 2),
    ],
)
def test_only_a_colocated_cluster_goes_without_prefill_workers(placement, prefill, num_prefill) -> None:
    config = ClusterConfig(placement=placement, prefill=prefill, decode=2)
    assert config.num_prefill == num_prefill
    assert config.num_workers == num_prefill + 2
    assert {name for name in config.worker_names if name.startswith("prefill")} == {
        f"prefill-{index}" for index in range(num_prefill)
    }


@pytest.mark.parametrize("placement", ["auto", "disaggregated"])
def test_every_other_placement_needs_a_prefill_worker(placement) -> None:
    with pytest.raises(ConfigError, match="1 to 64") as caught:
        ClusterConfig(placement=placement, prefill=0)
    assert caught.value.field == "prefill"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prefill", 0),
        ("prefill", 65),
        ("decode", -1),
        ("decode", 65),
        ("threads", 0),
        ("kv_cache_bytes", 0),
        ("kv_memory_fraction", 0.0),
        ("port", 65536),
        ("dashboard_port", -1),
        ("dtype", "int8"),
        ("prefill_kv_dtype", "fp16"),
        ("decode_kv_dtype", "half"),
        ("kv_transport", "tcp"),
        ("placement", "warm"),
        ("prefill_on", "slurm"),
        ("routers", 0),
        ("control_port", 65536),
        ("start_timeout_s", 0.0),
    ],
)
def test_a_bad_value_names_its_field(field, value) -> None:
    with pytest.raises(ConfigError) as caught:
        ClusterConfig(**{field: value})
    assert caught.value.field == field


def test_two_ports_of_the_router_must_differ() -> None:
    with pytest.raises(ConfigError) as caught:
        ClusterConfig(port=7000, admin_port=7000)
    assert caught.value.field == "admin_port"
    assert ClusterConfig(port=0, admin_port=0).admin_port == 0


def test_each_router_has_ports_of_its_own() -> None:
    config = ClusterConfig(routers=3)
    assert config.router_names == ["router-0", "router-1", "router-2"]
    assert config.ports_from(config.port) == [50051, 50061, 50071]
    assert config.ports_from(0) == [0, 0, 0]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"port": 7000, "admin_port": 7010, "routers": 2}, "admin_port"),
        ({"control_port": 50061, "routers": 2}, "control_port"),
        ({"port": 65530, "routers": 2}, "port"),
        ({"dashboard_port": 50051}, "dashboard_port"),
    ],
)
def test_no_two_ports_are_the_same_and_none_is_too_high(given, field) -> None:
    with pytest.raises(ConfigError) as caught:
        ClusterConfig(**given)
    assert caught.value.field == field


def test_without_a_local_ray_its_dashboard_takes_no_port() -> None:
    assert ClusterConfig(ray=False, dashboard_port=50051).port == 50051


def test_who_runs_which_role() -> None:
    def on_ray(**given: object) -> tuple[bool, bool]:
        config = ClusterConfig(**given)
        return config.is_on_ray("prefill"), config.is_on_ray("decode")

    assert on_ray() == (False, True)
    assert on_ray(prefill_on="ray") == (True, True)
    assert on_ray(ray=False) == (False, False)


def test_prefill_on_ray_without_ray_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        ClusterConfig(ray=False, prefill_on="ray")
    assert caught.value.field == "prefill_on"


def test_a_ray_address_without_ray_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        ClusterConfig(ray=False, ray_address="127.0.0.1:6379")
    assert caught.value.field == "ray_address"
