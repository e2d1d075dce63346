"""docs/routing.md says what the code does: settings, their defaults, and a tenants' file that loads."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from router.config import RouterConfig
from router.tenancy.tenants import Tenants

GUIDE = (Path(__file__).parents[2] / "docs" / "routing.md").read_text(encoding="utf-8")
DEFAULTS = {field.name: field.default for field in dataclasses.fields(RouterConfig)}
# What a router is and where it listens; not how it routes.
OF_THE_PROCESS = frozenset(
    [
        "name",
        "model",
        "host",
        "port",
        "http_port",
        "admin_host",
        "client_ca",
        "health_port",
        "admin_port",
        "redis_url",
        "namespace",
        "tls_cert",
        "tls_key",
        "tls_ca",
        "tls_server_name",
        "write_timeout_s",
        "drain_s",
        "dashboard_url",
        "trace_file",
        "log_level",
        "ready_file",
    ]
)
SETTINGS = re.findall(
    r"^\| `(\w+)` \| ([^|]+?) \| ", GUIDE.partition("\n## Who is served next")[0], re.MULTILINE
)


def _shown(default: object) -> str:
    """A default as the guide writes it."""
    match default:
        case "":
            return "none"
        case bool():
            return str(default).lower()
        case tuple():
            return ", ".join(map(str, default))
        case float():
            return f"{default:g}"
        case str():
            return f"`{default}`"
        case _:
            return str(default)


def test_guide_names_every_setting_of_routing() -> None:
    assert {name for name, _ in SETTINGS} == DEFAULTS.keys() - OF_THE_PROCESS


@pytest.mark.parametrize(("name", "shown"), SETTINGS, ids=[name for name, _ in SETTINGS])
def test_guide_states_the_default(name: str, shown: str) -> None:
    assert shown == _shown(DEFAULTS[name])


def test_tenants_file_of_the_guide_loads(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(
        re.findall(r"```toml\n(# /etc/baton/tenants\.toml\n.+?)```", GUIDE, re.DOTALL)[0], encoding="utf-8"
    )

    search, batch = Tenants.load(str(path))

    assert (search.name, search.weight, search.requests_per_minute) == ("search", 2.0, 600)
    assert (batch.name, batch.weight, batch.tokens_per_minute) == ("batch", 1.0, 3000)
