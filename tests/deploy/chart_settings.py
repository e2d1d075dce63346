"""The settings that the chart's processes read: its own file, and the variables of their containers."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from baton.config import load_config
from baton.pool.config import PoolConfig
from decode_worker.config import DecodeConfig
from prefill_worker.config import PrefillConfig
from router.config import RouterConfig
from tests.deploy.manifests import config_of, of_example, pods

CONFIGS: dict[str, type[Any]] = {
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "pool": PoolConfig,
}
# Containers by the section that they read; a decode worker has no container of its own.
CONTAINERS = {"router": "router", "prefill": "prefill", "decode": "ray-worker", "pool": "pool"}
POD = {"$(POD_IP)": "10.1.2.3", "$(POD_NAME)": "demo-pod-0"}


@cache
def settings(example: str, section: str) -> Any:
    """The settings as the process reads them in its pod.

    Raises ConfigError if there is a setting that the code does not have.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "baton.toml"
        path.write_text(config_of(of_example(example)))
        environ = {**environment(example, CONTAINERS[section]), "BATON_CONFIG": str(path)}
        return load_config(CONFIGS[section], section=section, argv=[], environ=environ)


def environment(example: str, container: str) -> dict[str, str]:
    """Variables of a container that have a value in the manifest."""
    (found,) = [
        each for pod in pods(of_example(example)) for each in pod.containers if each["name"] == container
    ]
    values = {variable["name"]: variable["value"] for variable in found["env"] if "value" in variable}
    return {name: POD.get(value, value) for name, value in values.items()}
