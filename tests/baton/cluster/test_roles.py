"""The command lines are checked by the very parsers that will read them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from baton.cluster import local_cluster
from baton.cluster.config import ClusterConfig
from baton.cluster.places import Places, Ports
from baton.cluster.role_process import RoleSpec
from baton.cluster.role_settings import RoleSettings
from baton.cluster.roles import pool_spec, router_specs, worker_spec, worker_specs
from baton.config import load_config
from baton.pool.config import PoolConfig
from baton.tls import TlsFiles
from decode_worker.config import DecodeConfig
from prefill_worker.config import PrefillConfig
from router.config import RouterConfig

PASSWORD = "5ecret"
REDIS_URL = f"redis://:{PASSWORD}@127.0.0.1:6000/0"


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(
        ports=Ports(
            public={"router-0": 1001, "router-1": 1011},
            http={"router-0": 1005, "router-1": 1015},
            admin={"router-0": 1002, "router-1": 1012},
            control=1004,
            dashboard=1003,
        ),
        redis_url=REDIS_URL,
        logs=tmp_path,
        ready_file=tmp_path / "pool.json",
        ray_dir=Path("/tmp/short"),
        config_file="",
        role_settings=RoleSettings({}),
    )


def read(spec: RoleSpec, cls: type, section: str):
    assert spec.command[0] == "-m"
    return load_config(cls, section=section, argv=spec.command[2:], environ=spec.environment)


def router_spec(config: ClusterConfig, places: Places) -> RoleSpec:
    return router_specs(config, places)[0]


def specs_of(role: str, config: ClusterConfig, places: Places) -> list[RoleSpec]:
    return [spec for spec in worker_specs(config, places) if spec.role == role]


def prefill_specs(config: ClusterConfig, places: Places) -> list[RoleSpec]:
    return specs_of("prefill", config, places)


def decode_specs(config: ClusterConfig, places: Places) -> list[RoleSpec]:
    return specs_of("decode", config, places)


def test_each_router_gets_a_name_and_ports(places) -> None:
    specs = router_specs(ClusterConfig(routers=2), places)
    configs = [read(spec, RouterConfig, "router") for spec in specs]
    assert [(config.name, config.port, config.http_port, config.admin_port) for config in configs] == [
        ("router-0", 1001, 1005, 1002),
        ("router-1", 1011, 1015, 1012),
    ]
    assert [spec.name for spec in specs] == ["router-0", "router-1"]


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


def test_each_role_has_a_kv_dtype_of_its_own(places) -> None:
    config = ClusterConfig(prefill_kv_dtype="bfloat16", decode_kv_dtype="float16", ray=False)
    (prefill,), (decode,) = prefill_specs(config, places), decode_specs(config, places)
    assert read(prefill, PrefillConfig, "prefill").kv_dtype == "bfloat16"
    assert read(decode, DecodeConfig, "decode").kv_dtype == "float16"


def test_the_pool_knows_the_kv_dtype_of_each_role(places) -> None:
    config = ClusterConfig(prefill_on="ray", prefill_kv_dtype="float32", decode_kv_dtype="bfloat16")
    environ = pool_spec(config, places).environment
    assert load_config(PrefillConfig, section="prefill", argv=[], environ=environ).kv_dtype == "float32"
    assert load_config(DecodeConfig, section="decode", argv=[], environ=environ).kv_dtype == "bfloat16"


def test_a_kv_dtype_that_is_not_set_is_left_to_the_role(places) -> None:
    (spec,) = decode_specs(ClusterConfig(ray=False), places)
    environ = {**spec.environment, "BATON_DECODE_KV_DTYPE": "float16"}
    config = load_config(DecodeConfig, section="decode", argv=spec.command[2:], environ=environ)
    assert config.kv_dtype == "float16"


@pytest.mark.parametrize("compiles", [True, False])
def test_plain_workers_and_those_of_the_pool_compile_if_the_cluster_says_so(places, compiles) -> None:
    config = ClusterConfig(compile=compiles)
    (prefill,), environ = prefill_specs(config, places), pool_spec(config, places).environment
    assert read(prefill, PrefillConfig, "prefill").compile is compiles
    decode = load_config(DecodeConfig, section="decode", argv=[], environ=environ)
    assert decode.compile is compiles


def test_whether_to_compile_is_left_to_the_role_if_the_cluster_says_nothing(places) -> None:
    (spec,) = prefill_specs(ClusterConfig(), places)
    environ = {**spec.environment, "BATON_PREFILL_COMPILE": "true"}
    assert load_config(PrefillConfig, section="prefill", argv=spec.command[2:], environ=environ).compile


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
    config = ClusterConfig(decode=2)
    spec = pool_spec(config, places)
    pool = read(spec, PoolConfig, "pool")
    assert (pool.decode, pool.prefill, pool.dashboard_port, pool.ray_dir) == (2, 0, 1003, "/tmp/short")
    assert (pool.control_port, pool.drain_s, pool.ready_file) == (0, 5.0, str(places.ready_file))
    assert spec.logs == (places.logs / "decode-0.log", places.logs / "decode-1.log")
    assert [spec.name for spec in worker_specs(config, places)] == ["pool", "prefill-0"]


def test_a_pool_that_starts_again_may_have_other_numbers_of_the_same_workers(places) -> None:
    config = ClusterConfig(decode=1, prefill=1, prefill_on="ray", kv_memory_fraction=0.4)
    first = pool_spec(config, places)
    spec = pool_spec(config, places, {"prefill": 2, "decode": 3})
    pool = read(spec, PoolConfig, "pool")
    assert (pool.prefill, pool.decode) == (2, 3)
    assert len(spec.logs) == 5
    assert spec.environment == first.environment


def test_the_supervisor_has_more_patience_than_the_pool(places) -> None:
    # What a pool may take: all its drains, then Ray's own end.
    from baton.pool.life import EXTRA_GRACE_S
    from baton.pool.ray_runtime import SHUTDOWN_WITHIN_S
    from baton.pool.serve import CLOSE_S

    beyond_drain_s = local_cluster.EXTRA_GRACE_S + pool_spec(ClusterConfig(), places).extra_grace_s
    assert beyond_drain_s > CLOSE_S + SHUTDOWN_WITHIN_S
    assert CLOSE_S > EXTRA_GRACE_S


def test_the_pool_may_place_prefill_workers_too(places) -> None:
    config = ClusterConfig(decode=1, prefill=2, prefill_on="ray")
    (spec,) = worker_specs(config, places)
    pool = read(spec, PoolConfig, "pool")
    assert (pool.decode, pool.prefill) == (1, 2)
    assert [path.name for path in spec.logs] == ["prefill-0.log", "prefill-1.log", "decode-0.log"]


def test_what_its_workers_are_to_know_travels_in_the_environment(places) -> None:
    config = ClusterConfig(prefill_on="ray", threads=3, dtype="float32", kv_transport="grpc", namespace="n")
    spec = pool_spec(config, places)
    decode = load_config(DecodeConfig, section="decode", argv=[], environ=spec.environment)
    prefill = load_config(PrefillConfig, section="prefill", argv=[], environ=spec.environment)
    for worker in (decode, prefill):
        assert (worker.threads, worker.dtype, worker.namespace) == (3, "float32", "n")
        assert (worker.redis_url, worker.drain_s, worker.kv_memory_fraction) == (REDIS_URL, 5.0, 0.05)
    assert prefill.kv_transport == "grpc"


def test_what_the_cluster_leaves_open_stays_the_roles(places) -> None:
    own = RoleSettings({"BATON_DECODE_THREADS": "7"})
    spec = pool_spec(ClusterConfig(prefill_on="ray"), replace(places, role_settings=own))
    names = {name for name in spec.environment if name.startswith(("BATON_DECODE_", "BATON_PREFILL_"))}
    assert not names & {"BATON_DECODE_THREADS", "BATON_DECODE_DTYPE", "BATON_DECODE_KV_CACHE_BYTES"}
    assert "BATON_PREFILL_THREADS" in names
    assert not {name for name in names if name.endswith(("_TRACE_FILE", "_TLS_CA", "_KV_TRANSPORT"))}
    given = pool_spec(ClusterConfig(threads=2), replace(places, role_settings=own))
    assert given.environment["BATON_DECODE_THREADS"] == "2"


def test_a_given_ray_gets_no_folder_of_this_machine(places) -> None:
    spec = pool_spec(ClusterConfig(ray_address="10.0.0.1:6379"), places)
    config = read(spec, PoolConfig, "pool")
    assert (config.ray_address, config.ray_dir, config.log_dir) == ("10.0.0.1:6379", "", "")
    assert spec.logs == ()


def test_a_worker_can_be_added_later(places) -> None:
    config = ClusterConfig(ray=False, prefill=1, decode=1, threads=2)
    spec = worker_spec(config, places, role="decode", index=4)
    assert (spec.name, spec.role) == ("decode-4", "decode")
    assert read(spec, DecodeConfig, "decode").threads == 2


def test_without_ray_each_decode_worker_is_a_process(places) -> None:
    specs = decode_specs(ClusterConfig(decode=2, ray=False), places)
    assert [read(spec, DecodeConfig, "decode").name for spec in specs] == ["decode-0", "decode-1"]


def test_every_role_gets_the_files_of_tls(places) -> None:
    tls = TlsFiles(cert="/c", key="/k", ca="/a", server_name="n")
    given = {"tls_cert": "/c", "tls_key": "/k", "tls_ca": "/a", "tls_server_name": "n"}
    config = ClusterConfig(ray=False, **given)
    decode = read(decode_specs(config, places)[0], DecodeConfig, "decode")
    router = read(router_spec(config, places), RouterConfig, "router")
    prefill = read(prefill_specs(config, places)[0], PrefillConfig, "prefill")
    assert [role.tls for role in (router, prefill, decode)] == [tls] * 3
    spec = pool_spec(ClusterConfig(**given), places)
    actor = load_config(DecodeConfig, section="decode", argv=[], environ=spec.environment)
    assert [read(spec, PoolConfig, "pool").tls, actor.tls] == [tls] * 2


def test_without_tls_here_a_role_keeps_its_own(places) -> None:
    specs = [*prefill_specs(ClusterConfig(), places), router_spec(ClusterConfig(), places)]
    assert not [spec.name for spec in specs if "--tls" in " ".join(spec.command)]


def test_no_command_line_holds_the_password(places) -> None:
    config = ClusterConfig(prefill=2, decode=2)
    specs = [*router_specs(config, places), *worker_specs(config, places)]
    assert not [spec.name for spec in specs if PASSWORD in " ".join(spec.command)]
    assert all(REDIS_URL in spec.environment.values() for spec in specs)
    # Nor would a log that shows them.
    assert PASSWORD not in repr((places, specs))
