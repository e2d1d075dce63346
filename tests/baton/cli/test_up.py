"""What `baton up` refuses, before anything is started."""

from __future__ import annotations

import json
import socket

import pytest
from rich.console import Console

from baton.cli.cluster_console import ClusterConsole
from baton.cluster.config import ClusterConfig
from baton.cluster.local_cluster import LocalCluster
from baton.errors import Unavailable
from tests import bare_model

SETTINGS = ["--port=0", "--http-port=0", "--admin-port=0", "--control-port=0", "--dashboard-port=0"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ClusterConfig]:
    """The configs that would have been started, instead of clusters."""
    configs: list[ClusterConfig] = []

    async def start(self: ClusterConsole, config: ClusterConfig, config_file: str = "") -> LocalCluster:
        configs.append(config)
        raise Unavailable("nothing is started here")

    monkeypatch.setattr(ClusterConsole, "start", start)
    return configs


def settings(baton, started: list[ClusterConfig], *arguments: str) -> ClusterConfig:
    assert baton("up", *arguments).code == 3
    (config,) = started
    return config


def test_the_defaults(baton, started) -> None:
    assert settings(baton, started) == ClusterConfig()


def test_every_flag_arrives(baton, started, tmp_path) -> None:
    flags = ["--prefill=2", "--decode=3", "--model=m", "--threads=4", "--dtype=float32"]
    flags += ["--kv-cache-bytes=1000", "--port=1", "--admin-port=2", "--dashboard-port=3"]
    flags += ["--redis-url=redis://h/0", "--no-ray", f"--trace-file={tmp_path}", f"--log-dir={tmp_path}"]
    flags += ["--tls-cert=c", "--tls-key=k", "--tls-ca=a", "--tls-server-name=n", "--kv-transport=nixl"]
    flags += ["--placement=disaggregated", "--routers=2", "--control-port=4", "--drain-s=7"]
    flags += ["--prefill-kv-dtype=bfloat16", "--decode-kv-dtype=float16", "--compile"]
    assert settings(baton, started, *flags, "--start-timeout-s=9", "--http-port=5") == ClusterConfig(
        prefill=2,
        decode=3,
        model="m",
        threads=4,
        dtype="float32",
        prefill_kv_dtype="bfloat16",
        decode_kv_dtype="float16",
        compile=True,
        kv_cache_bytes=1000,
        placement="disaggregated",
        kv_transport="nixl",
        port=1,
        http_port=5,
        admin_port=2,
        control_port=4,
        routers=2,
        dashboard_port=3,
        redis_url="redis://h/0",
        ray=False,
        trace_file=str(tmp_path),
        log_dir=str(tmp_path),
        tls_cert="c",
        tls_key="k",
        tls_ca="a",
        tls_server_name="n",
        drain_s=7.0,
        start_timeout_s=9.0,
    )


def test_prefill_workers_may_be_actors_too(baton, started) -> None:
    assert settings(baton, started, "--prefill-on=ray") == ClusterConfig(prefill_on="ray")


def test_flags_win_over_the_environment_and_that_over_the_file(baton, started, tmp_path, monkeypatch) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("[cluster]\nprefill = 5\ndecode = 5\nthreads = 5\n[router]\nmax_queue = 9\n")
    monkeypatch.setenv("BATON_CLUSTER_PREFILL", "6")
    monkeypatch.setenv("BATON_CLUSTER_DECODE", "6")
    config = settings(baton, started, f"--config={file}", "--prefill=7")
    assert (config.prefill, config.decode, config.threads) == (7, 6, 5)


@pytest.mark.parametrize(
    ("flag", "field"),
    [
        ("--prefill=0", "prefill"),
        ("--dtype=int8", "dtype"),
        ("--decode-kv-dtype=fp8", "decode_kv_dtype"),
        ("--port=70000", "port"),
        ("--placement=warm", "placement"),
        ("--drain-s=-1", "drain_s"),
    ],
)
def test_a_bad_setting_is_exit_code_2_and_named(baton, started, flag, field) -> None:
    ran = baton("up", flag)
    assert ran.code == 2
    assert ran.err.startswith(f"error: {field} is ")
    assert started == []


@pytest.mark.parametrize("setting", ["port", "http_port", "admin_port", "control_port", "dashboard_port"])
def test_a_taken_port_is_refused_before_anything_starts(
    baton, tiny_folder, monkeypatch, tmp_path, setting
) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
    flag = "--" + setting.replace("_", "-")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        others = [other for other in SETTINGS if not other.startswith(flag + "=")]
        ran = baton("up", f"--model={tiny_folder}", *others, f"{flag}={port}")
    assert (ran.code, ran.out) == (2, "")
    assert f"port {port} ({setting}) cannot be used" in ran.err
    assert f"another port with {flag}" in ran.err
    assert not (tmp_path / "cache" / "run").exists()


def test_a_missing_model_says_what_to_run(baton, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    ran = baton("up", *SETTINGS)
    assert ran.code == 5
    assert "run: baton pull smollm2-135m-instruct" in ran.err


def test_a_report_stays_on_screen_once_the_cluster_runs(capsys) -> None:
    console = ClusterConsole(Console(stderr=True))
    console("prefill-0 was killed by SIGKILL; starting it again [bold]")
    assert capsys.readouterr().err == "prefill-0 was killed by SIGKILL; starting it again [bold]\n"


@pytest.fixture
def tiny_folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(bare_model.TEXT)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


class StartedCluster:
    """One that is up, and is stopped as soon as it runs."""

    config = ClusterConfig(model="tiny", ray=False)
    addresses = ("127.0.0.1:1", "127.0.0.1:2")
    address = "127.0.0.1:1"
    http_urls = ("http://127.0.0.1:3/v1",)
    admin_addresses = ("127.0.0.1:4",)
    control_address = "127.0.0.1:5"
    dashboard_url = "http://127.0.0.1:6"
    log_dir = "/logs"

    async def __aenter__(self) -> StartedCluster:
        return self

    async def __aexit__(self, *_error: object) -> None:
        return

    async def run(self) -> None:
        return


def test_json_names_every_address_once_they_can_be_used(baton, monkeypatch) -> None:
    async def start(self: ClusterConsole, config: ClusterConfig, config_file: str = "") -> StartedCluster:
        return StartedCluster()

    monkeypatch.setattr(ClusterConsole, "start", start)
    ran = baton("up", "--json")
    assert ran.code == 0
    assert json.loads(ran.out) == {
        "model": "tiny",
        "grpc": ["127.0.0.1:1", "127.0.0.1:2"],
        "http": ["http://127.0.0.1:3/v1"],
        "admin": ["127.0.0.1:4"],
        "control": "127.0.0.1:5",
        "dashboard_url": "",
        "log_dir": "/logs",
    }
    assert "http://127.0.0.1:3/v1" in ran.err
