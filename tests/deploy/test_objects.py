"""Every object of every example is one that Kubernetes, or its operator, takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from checks.chart_render import render
from checks.chart_values import CHART
from tests.deploy.manifests import EXAMPLES, Object, name_of, of_example, pods, rendered

SCHEMAS = Path(__file__).parent / "schemas"
# The oldest that the chart takes, and the newest that the package knows.
VERSIONS = ("1.29", "1.32", kubernetes_validate.latest_version())
# What no example has.
OPTIONS: dict[str, Any] = {
    "global": {"imageRegistry": "mirror.example.com"},
    "image": {"pullSecrets": {"registry": {}}, "worker": {"digest": "sha256:" + "0" * 64}},
    "model": {"tokenSecret": "hub"},
    "commonLabels": {"team": "search"},
    "commonAnnotations": {"note": "yes"},
    "serviceAccount": {"annotations": {"cloud.example.com/role": "none"}},
    "auth": {"tenantsSecret": "tenants"},
    "router": {
        "service": {"type": "NodePort", "annotations": {"note": "yes"}},
        "ingress": {
            "enabled": True,
            "host": "llm.example.com",
            "className": "any",
            "annotations": {"buffering": "off"},
            "tlsSecret": "host",
        },
        "autoscaling": {"kind": "hpa"},
        "podLabels": {"tier": "door"},
        "podAnnotations": {"note": "yes"},
        "nodeSelector": {"disk": "fast"},
        "tolerations": {"door": {"key": "door", "operator": "Exists"}},
        "affinity": {"nodeAffinity": {}},
        "extraEnv": {"HTTPS_PROXY": "http://proxy:3128"},
        "extraVolumes": {"ca": {"configMap": {"name": "authorities"}}},
        "extraVolumeMounts": {"ca": {"mountPath": "/etc/ca", "readOnly": True}},
    },
    "prefill": {
        "autoscaling": {"kind": "hpa"},
        "podLabels": {"tier": "prompt"},
        "extraEnv": {"OMP_NUM_THREADS": "2"},
        "extraVolumes": {"ca": {"configMap": {"name": "authorities"}}},
        "extraVolumeMounts": {"ca": {"mountPath": "/etc/ca", "readOnly": True}},
    },
    "decode": {
        "groups": {
            "main": {
                "image": {"tag": "next"},
                "nodeSelector": {"disk": "fast"},
                "affinity": {"nodeAffinity": {}},
                "extraEnv": {"OMP_NUM_THREADS": "2"},
            },
        },
        "ray": {"gcsFaultTolerance": {"enabled": True}},
    },
    "networkPolicy": {"egress": {"traces": {"namespaceSelector": {}}}, "hub": {"proxy": {"podSelector": {}}}},
    "extraObjects": {
        "more": {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-more"}}
    },
}
ALL = (*EXAMPLES, "options")


def objects_of(name: str) -> tuple[Object, ...]:
    return optional() if name == "options" else of_example(name)


@cache
def optional() -> tuple[Object, ...]:
    return tuple(rendered("defaults", **OPTIONS))


def is_of_kubernetes(found: Object) -> bool:
    """Whether Kubernetes has the kind itself."""
    group, _, _ = found["apiVersion"].rpartition("/")
    return "." not in group or (group.endswith(".k8s.io") and not group.startswith("gateway."))


def distinct(wanted: Callable[[str], Iterable[Object]]) -> dict[str, Object]:
    """Objects of all examples, each of the same content once, by what they are called in messages."""
    seen: dict[str, str] = {}
    found = {}
    for name in ALL:
        for each in wanted(name):
            text = json.dumps(each, sort_keys=True)
            if text not in seen:
                seen[text] = f"{name}: {name_of(each)}"
                found[seen[text]] = each
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_the_objects(version: str) -> None:
    core = distinct(lambda name: filter(is_of_kubernetes, objects_of(name)))
    refused = {where: why for where, each in core.items() if (why := why_refused(each, version))}
    assert refused == {}
    assert len({each["kind"] for each in core.values()}) == 11


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_the_pods_of_rays_groups(version: str) -> None:
    """KubeRay's operator hands them on as they are."""
    of_ray = distinct(of_rays_groups)
    assert len(of_ray) >= 2 * len(ALL) - 2
    refused = {where: why for where, each in of_ray.items() if (why := why_refused(each, version))}
    assert refused == {}


def of_rays_groups(name: str) -> Iterator[Object]:
    for pod in pods(objects_of(name)):
        if pod.owner["kind"] == "RayCluster":
            made = {"name": pod.component, "labels": pod.labels}
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": made, "spec": pod.spec}


def why_refused(found: Object, version: str) -> str:
    """Empty if Kubernetes takes it."""
    try:
        kubernetes_validate.validate(found, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error)
    return ""


def test_every_template_is_met() -> None:
    """By an example or by the options, so that none is unchecked."""
    met = set(render(values=OPTIONS))
    for example in EXAMPLES:
        met |= set(render([CHART / "examples" / f"{example}.yaml"] if example != "defaults" else []))
    templates = (CHART / "templates").rglob("*.yaml")
    assert {str(path.relative_to(CHART / "templates")).replace("/", "-") for path in templates} == met - {
        "NOTES.txt"
    }


@pytest.mark.parametrize("name", ALL)
def test_operators_take_the_objects_of_theirs(name: str) -> None:
    """By schemas written from their public documentation, closed where the chart sets fields."""
    for found in objects_of(name):
        schema = SCHEMAS / f"{found['kind'].lower()}.json"
        if schema.exists():
            validator = jsonschema.Draft7Validator(json.loads(schema.read_text()))
            assert [error.message for error in validator.iter_errors(found)] == [], name_of(found)


def test_every_object_of_an_operator_is_met_and_has_a_schema() -> None:
    theirs = {found["kind"] for name in ALL for found in objects_of(name) if not is_of_kubernetes(found)}
    assert {path.stem for path in SCHEMAS.glob("*.json")} == {kind.lower() for kind in theirs}


def test_a_wrong_field_is_found() -> None:
    (cluster,) = [found for found in of_example("defaults") if found["kind"] == "RayCluster"]
    wrong = {**cluster, "spec": {**cluster["spec"], "workerGroups": []}}
    with pytest.raises(jsonschema.ValidationError, match="workerGroups"):
        jsonschema.validate(wrong, json.loads((SCHEMAS / "raycluster.json").read_text()))
    (service, *_) = [found for found in of_example("defaults") if found["kind"] == "Service"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            {**service, "spec": {**service["spec"], "port": 1}}, VERSIONS[0], strict=True
        )
    assert name_of(service).startswith("Service demo-baton")
