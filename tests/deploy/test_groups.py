"""Decode groups, and what a pod does before it serves: images, devices, and the model that is pulled."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.manifests import Object, of_kind, pods, rendered

DIGEST = "sha256:" + "a" * 64
OTHER = "sha256:" + "b" * 64
NEXT = {"replicas": 1, "min": 0, "max": 1, "shm": "1Gi"}


def group(objects: list[Object], name: str) -> list[Object]:
    """Containers of a group's pods, the one that pulls first."""
    (cluster,) = of_kind(objects, "RayCluster")
    (found,) = [each for each in cluster["spec"]["workerGroupSpecs"] if each["groupName"] == name]
    spec = found["template"]["spec"]
    return [*spec["initContainers"], *spec["containers"]]


@pytest.mark.parametrize(
    ("own", "image"),
    [
        ({}, f"baton/worker-cpu@{DIGEST}"),
        ({"tag": "9.9"}, "baton/worker-cpu:9.9"),
        ({"digest": OTHER}, f"baton/worker-cpu@{OTHER}"),
        ({"repository": "mine/worker", "tag": "9.9"}, "mine/worker:9.9"),
        ({"repository": "mine/worker", "tag": "9.9", "digest": OTHER}, f"mine/worker@{OTHER}"),
    ],
)
def test_a_groups_own_image_takes_the_place_of_a_digest(own: dict[str, str], image: str) -> None:
    groups = {"next": {**NEXT, "image": own, "resources": {}}}
    objects = rendered("defaults", image={"worker": {"digest": DIGEST}}, decode={"groups": groups})
    assert [each["image"] for each in group(objects, "next")] == [image, image]
    assert {each["image"] for each in group(objects, "main")} == {f"baton/worker-cpu@{DIGEST}"}


def pulls(objects: list[Object]) -> dict[str, Object]:
    """Containers that pull the model, by the role of their pods."""
    with_one = [pod for pod in pods(objects) if "initContainers" in pod.spec]
    return {pod.component: pod.spec["initContainers"][0] for pod in with_one}


def test_the_model_is_pulled_as_the_role_would_and_without_its_device() -> None:
    resources = {
        "requests": {"cpu": "2", "memory": "8Gi", "nvidia.com/gpu": 1},
        "limits": {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": 1},
    }
    role = {"extraEnv": {"HTTPS_PROXY": "http://proxy:3128"}, "resources": resources}
    found = pulls(rendered("defaults", router=role, prefill=role, decode={"groups": {"main": role}}))
    assert set(found) == {"router", "prefill", "decode"}
    for container in found.values():
        environment = {each["name"]: each.get("value") for each in container["env"]}
        assert environment["HTTPS_PROXY"] == "http://proxy:3128"
        assert environment["NVIDIA_VISIBLE_DEVICES"] == "void"
        assert container["resources"] == {
            "requests": {"cpu": "2", "memory": "8Gi"},
            "limits": {"cpu": "4", "memory": "16Gi"},
        }


def test_rays_head_and_the_pool_see_no_device() -> None:
    (head,) = [pod for pod in pods(rendered("one-gpu-node")) if pod.component == "ray-head"]
    for container in head.containers:
        assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in container["env"]


@pytest.mark.parametrize(("address", "port"), [("other.example:6390", 6390), ("other.example", 6379)])
def test_the_head_reaches_the_redis_that_keeps_rays_state(address: str, port: int) -> None:
    fault = {"enabled": True, "redisAddress": address, "redisUsername": ""}
    objects = rendered("defaults", decode={"ray": {"gcsFaultTolerance": fault}})
    (cluster,) = of_kind(objects, "RayCluster")
    assert "redisUsername" not in cluster["spec"]["gcsFaultToleranceOptions"]
    (policy,) = [p for p in of_kind(objects, "NetworkPolicy") if p["metadata"]["name"].endswith("-ray-head")]
    anywhere = [rule["ports"] for rule in policy["spec"]["egress"] if "to" not in rule]
    assert [{"protocol": "TCP", "port": port}] in anywhere


def test_a_service_of_another_type_leaves_the_headless_one_as_it_is() -> None:
    inside = of_kind(rendered("defaults"), "Service")
    outside = of_kind(
        rendered(
            "defaults",
            auth={"tenantsSecret": "tenants"},
            router={"service": {"type": "LoadBalancer", "grpcPort": 443}},
        ),
        "Service",
    )
    headless, external = named(outside, "-grpc"), named(outside, "-grpc-external")
    assert headless == named(inside, "-grpc")
    assert headless["spec"]["clusterIP"] == "None"
    assert headless["spec"]["ports"][0]["port"] == 50051
    assert (external["spec"]["type"], external["spec"]["ports"][0]["port"]) == ("LoadBalancer", 443)
    assert external["spec"]["selector"] == headless["spec"]["selector"]


def named(objects: list[Object], suffix: str) -> Object:
    (found,) = [each for each in objects if each["metadata"]["name"].endswith(suffix)]
    return found


def test_prometheus_has_a_key_where_metrics_ask_for_one() -> None:
    monitor = {"enabled": True, "keySecret": "for-prometheus"}
    objects = rendered("defaults", auth={"tenantsSecret": "tenants"}, metrics={"serviceMonitor": monitor})
    (made,) = of_kind(objects, "ServiceMonitor")
    (endpoint,) = made["spec"]["endpoints"]
    assert endpoint["authorization"] == {"credentials": {"name": "for-prometheus", "key": "key"}}


def environments(objects: list[Object]) -> dict[str, dict[str, Any]]:
    """Of the containers of all pods but the test's and Redis', by name."""
    return {
        container["name"]: {each["name"]: each for each in container["env"]}
        for pod in pods(objects)
        for container in pod.spec["containers"]
        if pod.component not in ("test", "redis")
    }


def test_variables_may_be_numbers_and_come_from_secrets() -> None:
    secret = {"secretKeyRef": {"name": "a", "key": "b"}}
    extra = {"WORD": "x", "COUNT": 10_000_000, "SHARE": 0.5, "ON": True, "KEY": {"valueFrom": secret}}
    role = {"extraEnv": extra}
    objects = rendered("defaults", router=role, prefill=role, decode={"groups": {"main": role}})
    expected = {"WORD": "x", "COUNT": "10000000", "SHARE": "0.5", "ON": "true"}
    found = environments(objects)
    pulling = {each["name"]: each for each in pulls(objects)["decode"]["env"]}
    for environment in (found["router"], found["prefill"], found["ray-worker"], pulling):
        assert {name: environment[name]["value"] for name in expected} == expected
        assert environment["KEY"] == {"name": "KEY", "valueFrom": secret}


@pytest.mark.parametrize("example", ["defaults", "tls"])
def test_commands_in_a_pod_know_where_to_ask_and_what_to_show(example: str) -> None:
    """By the options' own variables, so that `kubectl exec ... -- baton status` needs none."""
    for environment in environments(rendered(example)).values():
        assert environment["BATON_ADMIN_ADDRESS"]["value"] == "$(POD_IP):50052"
        assert environment["BATON_CONTROL_ADDRESS"]["value"] == "$(POD_IP):50053"
        names = list(environment)
        assert names.index("POD_IP") < names.index("BATON_ADMIN_ADDRESS")
        tls = {name for name in names if name.startswith("BATON_TLS_")}
        wanted = {"BATON_TLS_CA", "BATON_TLS_CERT", "BATON_TLS_KEY", "BATON_TLS_SERVER_NAME"}
        assert tls == (wanted if example == "tls" else set())


def test_a_registry_may_end_with_a_slash() -> None:
    objects = rendered("defaults", **{"global": {"imageRegistry": "reg.example.com/"}})
    images = {c["image"] for pod in pods(objects) for c in pod.containers if pod.component != "redis"}
    assert all(image.startswith("reg.example.com/baton/") for image in images)
