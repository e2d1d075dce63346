from __future__ import annotations

import os

import pytest

from baton.pool.config import PoolConfig
from baton.pool.environment import prepare_environment

LOOPBACK_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
RECONNECT_SWITCH = "RAY_gcs_rpc_server_reconnect_timeout_s"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path)})


@pytest.mark.parametrize(
    ("address", "stays_on_loopback"),
    [("", True), ("127.0.0.1:6379", True), ("localhost:6379", True), ("10.0.0.1:6379", False)],
)
def test_a_local_ray_listens_on_loopback_only(address: str, *, stays_on_loopback: bool) -> None:
    prepare_environment(PoolConfig(ray_address=address))
    assert (os.environ.get(LOOPBACK_SWITCH) == "0") is stays_on_loopback
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


def test_a_local_ray_asks_for_a_token() -> None:
    prepare_environment(PoolConfig())
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_a_cluster_is_joined_with_a_token_if_there_is_one(tmp_path) -> None:
    prepare_environment(PoolConfig(ray_address="10.0.0.1:6379"))
    assert "RAY_AUTH_MODE" not in os.environ
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("t")
    prepare_environment(PoolConfig(ray_address="10.0.0.1:6379"))
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_what_the_user_has_set_stays() -> None:
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "t", "RAY_USAGE_STATS_ENABLED": "1"}
    prepare_environment(PoolConfig(ray_address="10.0.0.1:6379"))
    assert (os.environ["RAY_AUTH_MODE"], os.environ["RAY_USAGE_STATS_ENABLED"]) == ("disabled", "1")


def test_a_long_silence_of_rays_control_service_ends_no_process() -> None:
    prepare_environment(PoolConfig())
    assert os.environ[RECONNECT_SWITCH] == "600"
    os.environ[RECONNECT_SWITCH] = "60"
    prepare_environment(PoolConfig())
    assert os.environ[RECONNECT_SWITCH] == "60"
