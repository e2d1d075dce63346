"""The command lines are checked by the very parsers that will read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.cluster.config import ClusterConfig
from baton.cluster.role_process import RoleSpec
from baton.cluster.roles import Places, decode_specs, prefill_specs, router_spec
from baton.config import load_config
from baton.tls import TlsFiles
from decode_worker.config import DecodeConfig
from decode_worker.pool_config import PoolConfig
from prefill_worker.config import PrefillConfig
from router.config import RouterConfig

PASSWORD = "5ecret"
REDIS_URL = f"redis://:{PASSWORD}@127.0.0.1:6000/0"


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(
        port=1001,
        admin_port=1002,
        dashboard_port=1003,
        redis_url=REDIS_URL,
        logs=tmp_path,
        ready_file=tmp_path / "pool.json",
        ray_dir=Path("/tmp/short"),
        config_file="",
    )


def read(spec: RoleSpec, cls: type, section: str):
    assert spec.command[0] == "-m"
    return load_config(cls, section=section, argv=spec.command[2:], environ=spec.environment)


def test_the_router_gets_its_ports_and_the_dashboards_address(places) -> None:
    config = read(router_spec(ClusterConfig(drain_s=2.0), places), RouterConfig, "router")
    assert (config.port, config.admin_port, config.redis_url) == (1001, 1002, REDIS_URL)
    assert config.dashboard_url == "http://127.0.0.1:1003"
    assert config.drain_s == 2.0


def test_without_ray_the_router_names_no_dashboard(places) -> None:
    config = read(router_spec(ClusterConfig(ray=False), places), RouterConfig, "router")
    assert config.dashboard_url == ""


@pytest.mark.parametrize("placement", ["auto", "disaggregated", "colocated"])
def test_the_router_gets_the_placement(places, placement) -> None:
    config = read(router_spec(ClusterConfig(placement=placement), places), RouterConfig, "router")
    assert config.placement == placement


def test_a_placement_that_is_not_set_is_left_to_the_routers_own_settings(places) -> None:
    spec = router_spec(ClusterConfig(), places)
    environ = {**spec.environment, "BATON_ROUTER_PLACEMENT": "disaggregated"}
    config = load_config(RouterConfig, section="router", argv=spec.command[2:], environ=environ)
    assert config.placement == "disaggregated"


def test_a_colocated_cluster_runs_decode_workers_alone(places) -> None:
    config = ClusterConfig(placement="colocated", decode=2, ray=False)
    assert prefill_specs(config, places) == []
    assert [spec.name for spec in decode_specs(config, places)] == ["decode-0", "decode-1"]


def test_prefill_workers_have_names_and_share_settings(places) -> None:
    specs = prefill_specs(ClusterConfig(prefill=2, threads=3, dtype="float32"), places)
    configs = [read(spec, PrefillConfig, "prefill") for spec in specs]
    assert [config.name for config in configs] == ["prefill-0", "prefill-1"]
    assert {(config.threads, config.dtype, config.redis_url) for config in configs} == {
        (3, "float32", REDIS_URL)
    }


def test_all_workers_together_take_a_share_of_the_memory(places) -> None:
    config = ClusterConfig(prefill=2, decode=3, kv_memory_fraction=0.4, ray=False)
    shares = [
        read(spec, PrefillConfig, "prefill").kv_memory_fraction for spec in prefill_specs(config, places)
    ]
    shares += [read(spec, DecodeConfig, "decode").kv_memory_fraction for spec in decode_specs(config, places)]
    assert shares == [pytest.approx(0.08)] * 5


def test_what_is_not_set_is_left_to_the_roles_own_settings(places) -> None:
    (spec,) = prefill_specs(ClusterConfig(), places)
    environ = {**spec.environment, "BATON_PREFILL_DTYPE": "float16", "BATON_PREFILL_KV_CACHE_BYTES": "4096"}
    config = load_config(PrefillConfig, section="prefill", argv=spec.command[2:], environ=environ)
    assert (config.dtype, config.kv_cache_bytes) == ("float16", 4096)


def test_a_transport_is_a_matter_of_the_prefill_workers(places) -> None:
    (spec,) = prefill_specs(ClusterConfig(kv_transport="nixl"), places)
    assert read(spec, PrefillConfig, "prefill").kv_transport == "nixl"
    (spec,) = prefill_specs(ClusterConfig(), places)
    environ = {**spec.environment, "BATON_PREFILL_KV_TRANSPORT": "grpc"}
    config = load_config(PrefillConfig, section="prefill", argv=spec.command[2:], environ=environ)
    assert config.kv_transport == "grpc"


def test_one_pool_places_all_decode_workers_on_ray(places) -> None:
    (spec,) = decode_specs(ClusterConfig(decode=2), places)
    config = read(spec, PoolConfig, "decode")
    assert (config.workers, config.dashboard_port, config.ray_dir) == (2, 1003, "/tmp/short")
    assert spec.logs == (places.logs / "decode-0.log", places.logs / "decode-1.log")


def test_a_given_ray_gets_no_folder_of_this_machine(places) -> None:
    (spec,) = decode_specs(ClusterConfig(ray_address="10.0.0.1:6379"), places)
    config = read(spec, PoolConfig, "decode")
    assert (config.ray_address, config.ray_dir, config.log_dir) == ("10.0.0.1:6379", "", "")
    assert spec.logs == ()


def test_without_ray_each_decode_worker_is_a_process(places) -> None:
    specs = decode_specs(ClusterConfig(decode=2, ray=False), places)
    assert [read(spec, DecodeConfig, "decode").name for spec in specs] == ["decode-0", "decode-1"]


def test_every_role_gets_the_files_of_tls(places) -> None:
    tls = TlsFiles(cert="/c", key="/k", ca="/a", server_name="n")
    for ray in (True, False):
        config = ClusterConfig(ray=ray, tls_cert="/c", tls_key="/k", tls_ca="/a", tls_server_name="n")
        decode = read(decode_specs(config, places)[0], PoolConfig if ray else DecodeConfig, "decode")
        router = read(router_spec(config, places), RouterConfig, "router")
        prefill = read(prefill_specs(config, places)[0], PrefillConfig, "prefill")
        assert [role.tls for role in (router, prefill, decode)] == [tls] * 3


def test_without_tls_here_a_role_keeps_its_own(places) -> None:
    specs = [*prefill_specs(ClusterConfig(), places), router_spec(ClusterConfig(), places)]
    assert not [spec.name for spec in specs if "--tls" in " ".join(spec.command)]


def test_no_command_line_holds_the_password(places) -> None:
    config = ClusterConfig(prefill=2, decode=2)
    specs = [router_spec(config, places), *prefill_specs(config, places), *decode_specs(config, places)]
    assert not [spec.name for spec in specs if PASSWORD in " ".join(spec.command)]
    assert all(REDIS_URL in spec.environment.values() for spec in specs)
    # Nor would a log that shows them.
    assert PASSWORD not in repr((places, specs))
