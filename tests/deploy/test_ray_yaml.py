"""deploy/ray: the launcher's file is one that Ray takes, and the settings are those of the processes."""

from __future__ import annotations

import json
import re
from importlib import util
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from baton.config import load_config
from baton.pool.config import PoolConfig
from decode_worker.config import DecodeConfig
from prefill_worker.config import PrefillConfig
from router.config import RouterConfig

FOLDER = Path(__file__).parents[2] / "deploy" / "ray"
CLUSTER: dict[str, Any] = yaml.safe_load((FOLDER / "cluster.yaml").read_text())
SECTIONS: dict[str, type[Any]] = {
    "router": RouterConfig, "prefill": PrefillConfig, "decode": DecodeConfig, "pool": PoolConfig
}  # fmt: skip


def test_rays_own_schema_takes_the_file() -> None:
    spec = util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    schema = json.loads((Path(spec.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    errors = [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(CLUSTER)]
    assert errors == []
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(CLUSTER | {"no_such_key": 1}, schema)


@pytest.mark.parametrize("section", SECTIONS)
def test_the_settings_are_those_of_the_processes(section: str) -> None:
    argv = ["--config", str(FOLDER / "baton.toml")]
    assert load_config(SECTIONS[section], section=section, argv=argv, environ={}) is not None


def test_the_pool_asks_for_what_the_nodes_offer() -> None:
    argv = ["--config", str(FOLDER / "baton.toml")]
    pool = load_config(PoolConfig, section="pool", argv=argv, environ={})
    offered = re.search(r"--resources='(\{.*?\})'", " ".join(CLUSTER["worker_start_ray_commands"]))
    assert offered is not None
    asked = pool.ask("decode").resources
    assert asked == {"GPU": 1.0, **json.loads(offered[1])}
    assert pool.decode == len(CLUSTER["provider"]["worker_ips"]) == CLUSTER["max_workers"]


def test_every_start_of_ray_asks_for_the_token() -> None:
    commands = [*CLUSTER["head_start_ray_commands"], *CLUSTER["worker_start_ray_commands"]]
    starts = [command for command in commands if "ray start" in command or "baton.pool" in command]
    assert len(starts) == 3
    assert all("RAY_AUTH_MODE=token" in command for command in starts)
    assert not any("--dashboard-host=0.0.0.0" in command or "10001" in command for command in commands)
