"""What the chart's objects name exists: in the release, in the code, or in what the user's values name."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from importlib import metadata
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from baton.cli.commands import COMMANDS
from baton.v1 import inference_service_pb2
from checks.chart_values import CHART
from router.http import app
from tests.deploy.chart_settings import CONFIGS, CONTAINERS, settings
from tests.deploy.manifests import (
    EXAMPLES,
    Object,
    Pod,
    name_of,
    of_example,
    of_kind,
    pods,
    rendered,
    selects,
)

DOORS = {"grpc": 50051, "http": 8000}


class Read(Exception):
    """A command has read its arguments, and goes no further."""


def words_of(value: Any, key: str = "") -> set[tuple[str, str]]:
    """All strings of a structure, each with the key right above it."""
    if isinstance(value, dict):
        return {found for name, below in value.items() for found in words_of(below, str(name))}
    return {(key, value)} if isinstance(value, str) else set()


def named_by_users(example: str, kind: str) -> set[str]:
    """Names of the objects of a kind that an example takes to be there."""
    path = CHART / "examples" / f"{example}.yaml"
    found = words_of(yaml.safe_load(path.read_text())) if path.exists() else set()
    ends = {"Secret": "secret", "PersistentVolumeClaim": "claim"}.get(kind)
    return {word for key, word in found if ends and key.lower().endswith(ends)}


def made(objects: tuple[Object, ...], kind: str) -> dict[str, set[str] | None]:
    """Objects of a kind that the release brings, with their keys; None where those are not known here."""
    found: dict[str, set[str] | None] = {
        each["metadata"]["name"]: set(each["data"]) if "data" in each else None
        for each in of_kind(objects, kind)
    }
    if kind == "Secret":
        # What cert-manager's documentation says is in it.
        issued = of_kind(objects, "Certificate")
        found |= {each["spec"]["secretName"]: {"tls.crt", "tls.key", "ca.crt"} for each in issued}
    return found


def references(pod: Pod) -> list[tuple[str, str, set[str]]]:
    """Kind, name and keys of all that a pod needs to start."""
    found: list[tuple[str, str, set[str]]] = []
    for volume in pod.spec["volumes"]:
        if "secret" in volume:
            keys = {item["key"] for item in volume["secret"].get("items", [])}
            found.append(("Secret", volume["secret"]["secretName"], keys))
        if "configMap" in volume:
            found.append(("ConfigMap", volume["configMap"]["name"], set()))
        if "persistentVolumeClaim" in volume:
            found.append(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"], set()))
    for container in pod.containers:
        for variable in container.get("env", []):
            if "secretKeyRef" in variable.get("valueFrom", {}):
                key = variable["valueFrom"]["secretKeyRef"]
                found.append(("Secret", key["name"], {key["key"]}))
    if "serviceAccountName" in pod.spec:
        found.append(("ServiceAccount", pod.spec["serviceAccountName"], set()))
    return found


@pytest.mark.parametrize("example", EXAMPLES)
def test_what_pods_need_is_made_or_named_by_the_values(example: str) -> None:
    objects = of_example(example)
    for pod in pods(objects):
        needed = references(pod)
        assert needed, pod.component
        for kind, name, keys in needed:
            ours = made(objects, kind)
            assert name in ours.keys() | named_by_users(example, kind), f"{pod.component} needs {kind} {name}"
            assert keys <= (ours.get(name) or keys), f"{pod.component} needs {keys} of {kind} {name}"


def test_rays_token_is_the_file_that_its_processes_read() -> None:
    """By the key that KubeRay's documentation names, in a Secret that both the operator and the pods have."""
    (cluster,) = of_kind(of_example("defaults"), "RayCluster")
    secret = cluster["spec"]["authOptions"]["secretName"]
    assert made(of_example("defaults"), "Secret")[secret] == {"auth_token"}
    for pod in pods(of_example("defaults")):
        for container in pod.containers:
            values = {variable["name"]: variable.get("value") for variable in container.get("env", [])}
            if "RAY_AUTH_MODE" in values:
                assert file_in(pod, container, str(values["RAY_AUTH_TOKEN_PATH"])) == (secret, "auth_token")


def file_in(pod: Pod, container: Object, path: str) -> tuple[str, str]:
    """Secret or ConfigMap, and key, of a file in a container; fails where nothing is mounted."""
    place = PurePosixPath(path)
    for mount in container["volumeMounts"]:
        if place.parent == PurePosixPath(mount["mountPath"]):
            (volume,) = [each for each in pod.spec["volumes"] if each["name"] == mount["name"]]
            source = volume.get("secret", volume.get("configMap", {}))
            items = {item["path"]: item["key"] for item in source.get("items", [])}
            assert not items or place.name in items, f"{path} is not among {items}"
            return source.get("secretName", source.get("name")), items.get(place.name, place.name)
    raise AssertionError(f"nothing is mounted where {container['name']} looks for {path}")


def files_of(config: Any) -> set[str]:
    """Paths of files that settings name, in URLs too."""
    values = {str(getattr(config, name)) for name in type(config).__dataclass_fields__}
    urls = [urlsplit(value) for value in values if "://" in value]
    parameters = {value for url in urls for found in parse_qs(url.query).values() for value in found}
    return {value for value in values | parameters if value.startswith("/etc/")}


@pytest.mark.parametrize("section", CONFIGS)
@pytest.mark.parametrize("example", EXAMPLES)
def test_files_that_settings_name_are_mounted(example: str, section: str) -> None:
    objects = of_example(example)
    ((pod, container),) = [
        (pod, each) for pod in pods(objects) for each in pod.containers if each["name"] == CONTAINERS[section]
    ]
    config = files_of(settings(example, section))
    assert config or section == "pool"
    for path in [*config, "/etc/baton/config/baton.toml"]:
        source, key = file_in(pod, container, path)
        keys = {**made(objects, "Secret"), **made(objects, "ConfigMap")}.get(source)
        assert keys is None or key in keys, path


@pytest.mark.parametrize("example", EXAMPLES)
def test_what_processes_write_to_is_a_volume_that_can_be_written(example: str) -> None:
    for pod in pods(of_example(example)):
        empty = {volume["name"] for volume in pod.spec["volumes"] if "emptyDir" in volume}
        for container in pod.containers:
            mounts = container["volumeMounts"]
            writable = {mount["mountPath"] for mount in mounts if mount["name"] in empty}
            assert all(mount.get("readOnly") for mount in mounts if mount["name"] not in empty)
            places = {
                v["value"] for v in container.get("env", []) if v["name"] in ("HOME", "BATON_CACHE_DIR")
            }
            assert places | {"/tmp"} <= writable, f"{pod.component} {container['name']}"


def commands(example: str) -> set[tuple[str, ...]]:
    found = set()
    for pod in pods(of_example(example)):
        for container in pod.containers:
            before_stop = container.get("lifecycle", {}).get("preStop", {}).get("exec", {})
            found |= {tuple(each["command"]) for each in (container, before_stop) if "command" in each}
    return found


@pytest.mark.parametrize("example", EXAMPLES)
def test_commands_are_those_of_the_code(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = set()
    for words in commands(example):
        if words[:2] == ("python", "-m"):
            modules.add(words[2])
            _read_by_module(words, monkeypatch)
        elif words[0] == "baton":
            assert words[1] in {command.name for command in COMMANDS}
            assert len(words) == 3
        else:
            assert words[0] in ("sleep", "sh")
    assert modules == {"router", "prefill_worker", "baton.pool", "baton.pool.leave_node", "baton.doors_check"}
    (script,) = metadata.entry_points(group="console_scripts", name="baton")
    assert callable(script.load())


def _read_by_module(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where `python -m` finds nothing to run, or it refuses its arguments."""
    _, _, name, *arguments = words
    spec = importlib.util.find_spec(name)
    assert spec is not None
    if spec.submodule_search_locations is not None:
        assert importlib.util.find_spec(f"{name}.__main__") is not None
    if arguments:

        def stop(*_: object) -> None:
            raise Read

        module = importlib.import_module(name)
        monkeypatch.setattr(module, "find_raylet", stop)
        monkeypatch.setattr("sys.argv", [name, *arguments])
        with pytest.raises(Read):
            module.main()


def test_monitors_find_ports_that_serve_metrics() -> None:
    objects = of_example("autoscaled")
    (of_services,) = of_kind(objects, "ServiceMonitor")
    (endpoint,) = of_services["spec"]["endpoints"]
    doors = [
        (service["metadata"]["name"], port["targetPort"])
        for service in of_kind(objects, "Service")
        if selects(of_services["spec"]["selector"], service["metadata"]["labels"])
        for port in service["spec"]["ports"]
        if port["name"] == endpoint["port"]
    ]
    assert doors == [("demo-baton-http", "http")]
    assert endpoint["path"] in route_paths()
    (of_pods,) = of_kind(objects, "PodMonitor")
    (endpoint,) = of_pods["spec"]["podMetricsEndpoints"]
    watched = [pod for pod in pods(objects) if selects(of_pods["spec"]["selector"], pod.labels)]
    assert {pod.component for pod in watched} == {"ray-head", "decode"}
    for pod in watched:
        ports = {port["name"] for container in pod.containers for port in container.get("ports", [])}
        assert endpoint["port"] in ports, pod.component


def route_paths() -> set[str]:
    """Paths of the OpenAI door, as its code lists them."""
    return set(re.findall(r'Route\(\s*"(/[^"]*)"', inspect.getsource(app)))


def test_routes_and_ingresses_lead_to_the_doors() -> None:
    objects = rendered("tls", router={"ingress": {"enabled": True, "host": "llm.example.com"}})
    services = {each["metadata"]["name"]: each for each in of_kind(objects, "Service")}
    led = {}
    for route in [*of_kind(objects, "HTTPRoute"), *of_kind(objects, "GRPCRoute")]:
        for backend in (each for rule in route["spec"]["rules"] for each in rule["backendRefs"]):
            (port,) = [p for p in services[backend["name"]]["spec"]["ports"] if p["port"] == backend["port"]]
            led[route["kind"]] = DOORS[port["targetPort"]]
    (ingress,) = of_kind(objects, "Ingress")
    for path in ingress["spec"]["rules"][0]["http"]["paths"]:
        backend = path["backend"]["service"]
        (port,) = [
            p for p in services[backend["name"]]["spec"]["ports"] if p["name"] == backend["port"]["name"]
        ]
        led["Ingress"] = DOORS[port["targetPort"]]
        assert any(each.startswith(f"{path['path']}/") for each in route_paths())
        # An open string in Kubernetes' schema: of Exact, Prefix and ImplementationSpecific.
        assert path["pathType"] == "Prefix"
    assert led == {"HTTPRoute": 8000, "GRPCRoute": 50051, "Ingress": 8000}
    (route,) = of_kind(objects, "GRPCRoute")
    (match,) = route["spec"]["rules"][0]["matches"]
    known = inference_service_pb2.DESCRIPTOR.services_by_name.values()
    assert match["method"]["service"] in {service.full_name for service in known}


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_service_without_an_address_has_the_ports_of_its_pods(example: str) -> None:
    """Its name gives the pods' own addresses, where nothing maps ports."""
    found = list(pods(of_example(example)))
    for service in of_kind(of_example(example), "Service"):
        if service["spec"].get("clusterIP") != "None":
            continue
        (pod,) = [pod for pod in found if selects({"matchLabels": service["spec"]["selector"]}, pod.labels)]
        ports = {port["name"]: port["containerPort"] for c in pod.containers for port in c.get("ports", [])}
        for port in service["spec"]["ports"]:
            assert port["port"] == ports[port["targetPort"]], name_of(service)


def test_the_certificate_has_the_names_that_are_checked() -> None:
    (certificate,) = of_kind(of_example("tls"), "Certificate")
    names = certificate["spec"]["dnsNames"]
    for section in CONFIGS:
        assert settings("tls", section).tls_server_name in names
    (test,) = [pod for pod in pods(of_example("tls")) if pod.component == "test"]
    values = {v["name"]: v.get("value", "") for v in test.spec["containers"][0]["env"]}
    assert values["BATON_ADDRESS"].partition(":")[0] in names
    assert urlsplit(values["BATON_HTTP_URL"]).hostname in names
    assert {"llm.example.com", "demo-baton-grpc.prod.svc.cluster.local"} <= set(names)
    assert set(certificate["spec"]["usages"]) == {"server auth", "client auth"}


def test_a_gateway_speaks_tls_to_what_its_routes_lead_to() -> None:
    objects = of_example("tls")
    (policy,) = of_kind(objects, "BackendTLSPolicy")
    (certificate,) = of_kind(objects, "Certificate")
    routes = of_kind(objects, "HTTPRoute") + of_kind(objects, "GRPCRoute")
    led_to = {
        backend["name"]
        for route in routes
        for rule in route["spec"]["rules"]
        for backend in rule["backendRefs"]
    }
    assert led_to == {"demo-baton-http", "demo-baton-grpc"}
    assert {target["name"] for target in policy["spec"]["targetRefs"]} == led_to
    assert policy["spec"]["validation"]["hostname"] in certificate["spec"]["dnsNames"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_scalers_budgets_and_statefulsets_name_objects_of_the_release(example: str) -> None:
    objects = of_example(example)
    names = {(each["kind"], each["metadata"]["name"]) for each in objects}
    assert len(names) == len(objects), "two objects of one name"
    for each in objects:
        if each["kind"] == "StatefulSet":
            assert ("Service", each["spec"]["serviceName"]) in names
        if each["kind"] == "ScaledObject":
            assert ("Deployment", each["spec"]["scaleTargetRef"]["name"]) in names


def test_labels_of_all_objects_are_no_part_of_selectors() -> None:
    objects = rendered("autoscaled", commonLabels={"team": "search"}, commonAnnotations={"note": "x"})
    for each in objects:
        assert each["metadata"]["labels"]["team"] == "search", name_of(each)
        assert each["metadata"]["annotations"]["note"] == "x", name_of(each)
    for pod in pods(objects):
        assert pod.labels["team"] == "search", pod.component
    text = yaml.safe_dump([each["spec"] for each in objects if each["kind"] == "NetworkPolicy"])
    assert "team" not in text
    for each in objects:
        selector = each.get("spec", {}).get("selector", {})
        assert "team" not in selector.get("matchLabels", selector), name_of(each)


def test_two_releases_in_a_namespace_do_not_take_each_others_pods() -> None:
    for example in EXAMPLES:
        for each in of_example(example):
            spec = each.get("spec", {})
            selector = spec.get("selector", spec.get("podSelector"))
            if selector is not None:
                labels = selector.get("matchLabels", selector)
                assert labels["app.kubernetes.io/instance"] == "demo", name_of(each)
                assert labels["app.kubernetes.io/part-of"] == "baton", name_of(each)


def test_in_diagnosis_containers_sleep_and_are_not_probed() -> None:
    objects = rendered("defaults", diagnosticMode=True)
    asleep = [
        container
        for pod in pods(objects)
        for container in pod.containers
        if container["name"] in ("router", "prefill", "pool")
    ]
    assert [container["command"] for container in asleep] == [["sleep", "infinity"]] * 3
    assert not [probe for container in asleep for probe in container if probe.endswith("Probe")]
