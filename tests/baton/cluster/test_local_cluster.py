"""Where a cluster keeps what it writes."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest

from baton.cluster.config import ClusterConfig
from baton.cluster.local_cluster import _make_places


@pytest.mark.parametrize("given", [True, False], ids=["log-dir", "run-folder"])
def test_the_folder_of_the_logs_is_its_owners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
    config = ClusterConfig(log_dir=str(tmp_path / "logs") if given else "")
    places = _make_places(config, (1, 2, 3), "redis://127.0.0.1:1", "")
    shutil.rmtree(places.ray_dir)
    assert places.logs.is_relative_to(tmp_path)
    assert stat.S_IMODE(places.logs.stat().st_mode) == 0o700
