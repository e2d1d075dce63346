from __future__ import annotations

from pathlib import Path

import pytest

from baton.cluster.role_settings import RoleSettings
from baton.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "baton.toml"
    path.write_text('[decode]\nthreads = 3\nshm_folder = "/a"\n')
    return str(path)


def test_the_environment_wins_over_the_file_and_that_over_the_default(file: str) -> None:
    settings = RoleSettings({"BATON_DECODE_SHM_FOLDER": "/b"}, file)
    assert settings.text("decode", "shm_folder", "/c") == "/b"
    assert RoleSettings({}, file).text("decode", "shm_folder", "/c") == "/a"
    assert RoleSettings({}, file).text("prefill", "shm_folder", "/c") == "/c"


def test_what_is_set_anywhere_is_set(file: str) -> None:
    settings = RoleSettings({"BATON_PREFILL_DTYPE": "float16"}, file)
    assert settings.has("decode", "threads")
    assert settings.has("prefill", "dtype")
    assert not settings.has("prefill", "threads")


def test_the_file_may_be_named_by_the_environment(file: str) -> None:
    assert RoleSettings({"BATON_CONFIG": file}).has("decode", "threads")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.toml") as caught:
        RoleSettings({}, str(tmp_path / "nothing.toml"))
    assert caught.value.field == "config"
