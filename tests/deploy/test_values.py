"""Values that cannot be right are refused, by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import helm_python as helm
import pytest
import yaml

from checks.chart_render import render
from checks.chart_values import CHART, ValuesError, leaves, read_values, written
from tests.deploy.chart_settings import CONFIGS
from tests.deploy.manifests import rendered

VALUES = read_values((CHART / "values.yaml").read_text())
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def nested(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    return value  # type: ignore[no-any-return]


def maps(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Paths of all maps that are closed."""
    if schema.get("additionalProperties") is False:
        yield path
    for name, below in schema.get("properties", {}).items():
        yield from maps(below, f"{path}.{name}".strip("."))


def test_globals_of_a_parent_chart_are_let_through() -> None:
    assert "global" not in set(maps(SCHEMA))
    with_globals = rendered("defaults", **{"global": {"storageClass": "x"}})
    assert {each["kind"] for each in with_globals} == {each["kind"] for each in rendered("defaults")}


@pytest.mark.parametrize("path", sorted(maps(SCHEMA)))
def test_an_unknown_key_is_refused_at_every_level(path: str) -> None:
    values = nested(f"{path}.replicaCounts".strip("."), 1)
    with pytest.raises(helm.HelmError, match="replicaCounts"):
        render(values=values)


@pytest.mark.parametrize("name", [name for name, value in leaves(VALUES) if not value.is_free])
def test_a_value_of_another_type_is_refused(name: str) -> None:
    wrong = {"not": "this"}
    with pytest.raises(helm.HelmError, match=name.rsplit(".", maxsplit=1)[-1]):
        render(values=nested(name.replace("<name>", "main"), wrong))


def test_every_scalar_can_be_set_on_the_command_line() -> None:
    defaults = {name.replace("<name>", "main"): value.default for name, value in leaves(VALUES)}
    scalars = {name: value for name, value in defaults.items() if value and not isinstance(value, dict)}
    assert len(scalars) > 40
    options = ",".join(f"{name}={json.dumps(value).strip(chr(34))}" for name, value in scalars.items())
    without_secrets = [found for found in rendered("defaults") if found["kind"] != "Secret"]
    given = rendered("defaults", **helm.parse_set_string(options))
    assert [found for found in given if found["kind"] != "Secret"] == without_secrets


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"model": {"volume": {"kind": "claim"}}},
            "model.volume.claim is empty; name the PersistentVolumeClaim",
        ),
        ({"model": {"volume": {"kind": "hostPath"}}}, "model.volume.hostPath is empty"),
        ({"redis": {"bundled": {"enabled": False}}}, "redis.external.url is empty"),
        ({"redis": {"external": {"url": "redis://u:pw@h:1/0"}}}, "redis.external.url holds a password"),
        ({"redis": {"external": {"url": "redis://h:1/0?a=b"}}}, "redis.external.url has parameters"),
        (
            {"decode": {"serving": "other"}},
            'decode.serving is "other", which decode.groups does not have; it has main',
        ),
        ({"redis": {"external": {"ca": "ca.crt"}}}, "redis.existingSecret, which is empty; name the Secret"),
        ({"router": {"service": {"grpcPort": 443}}}, "router.service.grpcPort is 443"),
        ({"settings": {"router": {"http_port": 80}}}, "settings.router.http_port is the chart's own"),
        ({"settings": {"decode": {"host": "0.0.0.0"}}}, "settings.decode.host is the chart's own"),
        ({"settings": {"pool": {"drain_s": 5}}}, "set decode.drainSeconds"),
        ({"settings": {"prefill": {"redis_url": "redis://:pw@h:1"}}}, "settings.prefill.redis_url holds a"),
        ({"decode": {"groups": {"main": {"replicas": 0}}}}, "decode.groups.main.replicas is 0"),
        ({"decode": {"groups": {"main": {"replicas": 9}}}}, "must lie between min (0) and max (8)"),
        ({"tls": {"enabled": True}}, "name the Secret in tls.secret"),
        ({"tls": {"certManager": {"enabled": True, "issuer": "x"}}}, "tls.enabled is false"),
        ({"tls": {"enabled": True, "certManager": {"enabled": True}}}, "tls.certManager.issuer is empty"),
        ({"router": {"ingress": {"enabled": True}}}, "router.ingress.host is empty"),
        ({"router": {"gateway": {"enabled": True}}}, "router.gateway.name is empty"),
        ({"prefill": {"autoscaling": {"min": 9}}}, "prefill.autoscaling.min is 9 and max is 8"),
        ({"router": {"service": {"type": "LoadBalancer"}}}, "auth.tenantsSecret is empty"),
        (
            {"prefill": {"replicas": 0, "autoscaling": {"kind": "keda"}}},
            "prefill.autoscaling.kind is keda and prefill.replicas is 0",
        ),
        (
            {"router": {"gateway": {"enabled": True, "name": "g", "caConfigMap": "ca"}}},
            "router.gateway.caConfigMap is set and tls.enabled is false",
        ),
        (
            {"commonLabels": {"app.kubernetes.io/component": "x"}},
            "commonLabels has app.kubernetes.io/component, which is the chart's own",
        ),
        (
            {"router": {"gateway": {"enabled": True, "name": "g", "host": "a.b", "grpcHost": "a.b"}}},
            "router.gateway.grpcHost is router.gateway.host",
        ),
        (
            {"router": {"gateway": {"enabled": True, "name": "g", "grpcHost": "a.b"}}},
            "router.gateway.host is empty and grpcHost is not",
        ),
        (
            {"auth": {"tenantsSecret": "t"}, "metrics": {"serviceMonitor": {"enabled": True}}},
            "metrics.serviceMonitor.keySecret is empty",
        ),
        (
            {"prefill": {"autoscaling": {"kind": "keda"}}},
            "prefill.autoscaling.kind is keda and metrics.serviceMonitor.enabled is false",
        ),
        ({"redis": {"external": {"url": "redis://h:1/0"}}}, "redis.bundled.enabled is true; set"),
        (
            {"redis": {"bundled": {"enabled": False}, "external": {"url": "redis+sentinel://h:1/0"}}},
            "write redis://host:port/db, or rediss:// for TLS",
        ),
        (
            {"redis": {"bundled": {"enabled": False}, "external": {"url": "h.platform:6379"}}},
            "write redis://",
        ),
        (
            {
                "redis": {
                    "bundled": {"enabled": False},
                    "external": {"url": "redis://h:1/0", "ca": "ca.crt"},
                    "existingSecret": "s",
                }
            },
            "redis.external.url is not rediss://",
        ),
        ({"tls": {"secret": "s"}}, "tls.secret is set and tls.enabled is false"),
        (
            {"router": {"ingress": {"enabled": True, "host": "a.b"}}},
            "router.ingress.enabled is true and auth",
        ),
        (
            {"router": {"gateway": {"enabled": True, "name": "g", "host": "a.b"}}},
            "router.gateway.enabled is true and auth.tenantsSecret is empty",
        ),
        ({"decode": {"groups": {"next": {"replicas": 2}}}}, "decode.groups.next.min is missing"),
        ({"prefill": {"device": "cuda"}}, "prefill.resources names no GPU"),
        ({"decode": {"device": "cuda:1"}}, "decode.groups.main.resources names no GPU"),
        ({"prefill": {"device": "gpu"}}, "/prefill/device"),
        ({"router": {"extraEnv": {"BATON_CONFIG": "/x"}}}, "router.extraEnv has BATON_CONFIG"),
        (
            {"decode": {"groups": {"main": {"extraEnv": {"RAY_AUTH_MODE": "x"}}}}},
            "decode.groups.main.extraEnv has RAY_AUTH_MODE",
        ),
        ({"metrics": {"podMonitor": {"enabled": True}}}, "networkPolicy.monitoring is empty"),
        (
            {
                "metrics": {"serviceMonitor": {"enabled": True}},
                "networkPolicy": {"clients": {"a": {"podSelector": {}}}},
            },
            "name Prometheus in networkPolicy.monitoring",
        ),
        ({"metrics": {"prometheusRule": {"enabled": True}}}, "BatonRouterDown would fire for ever"),
        ({"settings": {"router": {"placement": {"a": 1}}}}, "settings.router.placement has no value that"),
        ({"settings": {"pool": {"decode": 3}}}, "settings.pool.decode follows from the chart's other values"),
        ({"settings": {"router": {"tls_cert": ""}}}, "settings.router.tls_cert follows from"),
        ({"router": {"podLabels": {"app.kubernetes.io/name": "x"}}}, "router.podLabels has"),
    ],
)
def test_values_that_do_not_fit_together_say_what_to_do(values: dict[str, Any], words: str) -> None:
    with pytest.raises(helm.HelmError) as caught:
        render(values=values)
    assert words in str(caught.value)


PORTS = [
    (section, field.name)
    for section, config in CONFIGS.items()
    for field in dataclasses.fields(config)
    # The dashboard's is that of a Ray which the pool starts itself.
    if f"_{field.name}".endswith("_port") and field.name != "dashboard_port"
]


@pytest.mark.parametrize(("section", "name"), PORTS)
def test_ports_of_the_code_are_not_to_be_set_beside_the_manifests(section: str, name: str) -> None:
    with pytest.raises(helm.HelmError, match=f"settings.{section}.{name} is the chart's own"):
        render(values={"settings": {section: {name: 1234}}})


def test_the_chart_passes_helms_lint() -> None:
    found = helm.lint(str(CHART))
    assert found["errors"] == []
    # What Helm calls information; 2 are warnings.
    assert [message for message in found["messages"] if message["severity"] >= 2] == []


def test_a_value_without_a_word_about_it_breaks_the_generator() -> None:
    with pytest.raises(ValuesError, match="line 1: a has no comment"):
        read_values("a: 1\n")
    with pytest.raises(ValuesError, match="@schema"):
        read_values("# -- what\n# @schema {]: 3\na: 1\n")


def test_generated_files_are_those_of_the_values() -> None:
    for path, text in written().items():
        assert path.read_text() == text, path


def test_notes_name_the_next_command_and_warn() -> None:
    notes = render()["NOTES.txt"]
    assert "helm test demo --namespace prod" in notes
    assert "there are no tenants" in notes
    assert "plain text" in notes
    safe = render([CHART / "examples" / "tls.yaml"])["NOTES.txt"]
    assert "WARNING" not in safe
    unsaid = {"router": {"gateway": {"caConfigMap": ""}}}
    assert "give router.gateway.caConfigMap" in render([CHART / "examples" / "tls.yaml"], unsaid)["NOTES.txt"]
