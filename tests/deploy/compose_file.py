"""deploy/compose.yaml as Compose reads it, and what its containers would run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.dockerfile import ROOT, Stage, stages

COMPOSE = ROOT / "deploy" / "compose.yaml"
Service = dict[str, Any]


def read(**variables: str) -> dict[str, Any]:
    """With the variables of the specification's interpolation, and with its merge keys resolved."""
    found: dict[str, Any] = _interpolated(yaml.safe_load(COMPOSE.read_text(encoding="utf-8")), variables)
    return found


def services(*profiles: str, **variables: str) -> dict[str, Service]:
    """Those that are started with these profiles."""
    every: dict[str, Service] = read(**variables)["services"]
    return {
        name: service
        for name, service in every.items()
        if not service.get("profiles") or set(service["profiles"]) & set(profiles)
    }


def image_of(service: Service) -> Stage:
    """The last stage of the Dockerfile that makes a service's image, which is one of ours."""
    repository = service["image"].partition(":")[0]
    return stages(Path(repository).name)[-1]


def argv(service: Service) -> list[str]:
    """What a container of one of our images runs."""
    return [*image_of(service).only("ENTRYPOINT").words, *service["command"]]


def environment(service: Service) -> dict[str, str]:
    """What a container has, but for the image's PATH and what comes from the shell that starts it."""
    given = {name: str(value) for name, value in service["environment"].items() if value is not None}
    of_image = image_of(service).pairs
    return {name: of_image[name] for name in of_image if "." not in name and name != "PATH"} | given


def seconds(duration: str) -> int:
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([hms])", duration))


def _interpolated(value: Any, variables: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _interpolated(item, variables) for key, item in value.items()}
    if isinstance(value, list):
        return [_interpolated(item, variables) for item in value]
    if not isinstance(value, str):
        return value

    def put(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found["name"]) or found["default"]

    text = re.sub(r"\$\$|\$\{(?P<name>\w+):-(?P<default>[^}]*)\}", put, value)
    assert not re.search(r"\$\{", text), f"a variable without a default: {value}"
    return text
