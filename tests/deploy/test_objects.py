"""Every object of every example is one that Kubernetes, or its operator, takes."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest

from tests.deploy.manifests import EXAMPLES, name_of, of_example, pods

SCHEMAS = Path(__file__).parent / "schemas"
# The oldest that the chart takes, and the newest that the package knows.
VERSIONS = ("1.29", "1.32", kubernetes_validate.latest_version())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("example", EXAMPLES)
def test_kubernetes_takes_the_objects(example: str, version: str) -> None:
    checked = 0
    for found in of_example(example):
        if "." in found["apiVersion"].partition("/")[0] and not found["apiVersion"].endswith("k8s.io/v1"):
            continue
        if found["apiVersion"].startswith("gateway."):
            continue
        kubernetes_validate.validate(found, version, strict=True)
        checked += 1
    assert checked >= 12


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("example", EXAMPLES)
def test_kubernetes_takes_the_pods_of_rays_groups(example: str, version: str) -> None:
    """KubeRay's operator hands them on as they are."""
    of_ray = [pod for pod in pods(of_example(example)) if pod.owner["kind"] == "RayCluster"]
    assert len(of_ray) >= 2
    for pod in of_ray:
        made = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", "labels": pod.labels}}
        kubernetes_validate.validate({**made, "spec": pod.spec}, version, strict=True)


@pytest.mark.parametrize("example", EXAMPLES)
def test_operators_take_the_objects_of_theirs(example: str) -> None:
    """By schemas written from their public documentation, closed where the chart sets fields."""
    for found in of_example(example):
        schema = SCHEMAS / f"{found['kind'].lower()}.json"
        if schema.exists():
            jsonschema.validate(found, json.loads(schema.read_text()))


def test_every_object_of_an_operator_is_met_and_has_a_schema() -> None:
    theirs = {
        found["kind"]
        for example in EXAMPLES
        for found in of_example(example)
        if ("." in found["apiVersion"].partition("/")[0] and not found["apiVersion"].endswith("k8s.io/v1"))
        or found["apiVersion"].startswith("gateway.")
    }
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
