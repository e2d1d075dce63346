"""What holds between the chart's objects, and between them and the code they run."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

from baton.certificate_watch import CertificateWatch
from baton.pool.actor_metrics import _GAUGES
from baton.rpc_server import LIVENESS, READINESS
from checks.chart_values import CHART
from router.learning.cost_model import CostModel
from router.metrics import RouterMetrics
from tests.certificates import Authority
from tests.deploy.chart_settings import CONFIGS, settings
from tests.deploy.manifests import (
    EXAMPLES,
    config_of,
    name_of,
    of_example,
    of_kind,
    pods,
    rendered,
    selects,
)

RAY_PORTS, REDIS_PORT, ADMIN_PORTS = {6379, 8265, 10001}, 6379, {50052, 50053}


@pytest.mark.parametrize("section", CONFIGS)
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_processes_take_their_settings(example: str, section: str) -> None:
    assert settings(example, section) is not None


@pytest.mark.parametrize("example", EXAMPLES)
def test_selectors_take_the_pods_they_mean_and_no_others(example: str) -> None:
    objects, found = of_example(example), list(pods(of_example(example)))
    selectors = 0
    for each in objects:
        selector = each.get("spec", {}).get("selector", each.get("spec", {}).get("podSelector"))
        if selector is None or each["kind"] == "ServiceMonitor":
            continue
        wanted = {"matchLabels": selector} if each["kind"] == "Service" else selector
        taken = {pod.component for pod in found if selects(wanted, pod.labels)}
        assert taken, f"{name_of(each)} selects no pod"
        assert len(taken) == 1 or each["kind"] == "PodMonitor", f"{name_of(each)} selects {taken}"
        changing = {"app.kubernetes.io/version", "helm.sh/chart", "app.kubernetes.io/managed-by"}
        assert not changing & wanted["matchLabels"].keys(), name_of(each)
        selectors += 1
    assert selectors >= 10


@pytest.mark.parametrize("example", EXAMPLES)
def test_ports_are_those_that_the_code_serves(example: str) -> None:
    router, prefill = settings(example, "router"), settings(example, "prefill")
    decode, pool = settings(example, "decode"), settings(example, "pool")
    served = {
        "router": {router.port, router.http_port, router.admin_port, router.health_port},
        "prefill": {prefill.port, prefill.health_port},
        "decode": {decode.port, 8080},
        "ray-head": {6379, 8265, 8080, pool.control_port, pool.health_port},
        "redis": {6379},
        "test": set(),
    }
    for pod in pods(of_example(example)):
        named = {port["containerPort"] for container in pod.containers for port in container.get("ports", [])}
        assert named == served[pod.component], pod.component
        for container in pod.containers:
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if "grpc" in container.get(probe, {}):
                    assert container[probe]["grpc"]["port"] in {
                        router.health_port,
                        prefill.health_port,
                        pool.health_port,
                    }
                    # kubelet speaks no TLS, and this port has none.
                    wanted = READINESS if probe == "readinessProbe" else LIVENESS
                    assert container[probe]["grpc"]["service"] == wanted


@pytest.mark.parametrize("example", EXAMPLES)
def test_services_lead_to_ports_of_their_pods_and_only_the_doors_are_public(example: str) -> None:
    found = list(pods(of_example(example)))
    for service in of_kind(of_example(example), "Service"):
        (pod,) = [pod for pod in found if selects({"matchLabels": service["spec"]["selector"]}, pod.labels)]
        ports = {port["name"]: port["containerPort"] for c in pod.containers for port in c.get("ports", [])}
        reached = {ports[port["targetPort"]] for port in service["spec"]["ports"]}
        if service["spec"].get("type", "ClusterIP") != "ClusterIP":
            assert pod.component == "router"
            assert reached <= {50051, 8000}
        assert not reached & (ADMIN_PORTS | (RAY_PORTS - {REDIS_PORT})), name_of(service)
        assert REDIS_PORT not in reached or pod.component == "redis"


@pytest.mark.parametrize("example", EXAMPLES)
def test_no_secret_is_where_secrets_do_not_belong(example: str) -> None:
    text = config_of(of_example(example))
    assert not re.search(r"://[^/@\s]*:[^@\s]+@", text)
    for pod in pods(of_example(example)):
        for container in pod.containers:
            words = " ".join([*container.get("command", []), *container.get("args", [])])
            assert not re.search(r"(?i)(token|key|secret)=\S", words)
            for variable in container.get("env", []):
                if re.search(r"TOKEN$|PASSWORD|API_KEY", variable["name"]):
                    assert "secretKeyRef" in variable["valueFrom"], variable["name"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_grace_is_longer_than_what_it_is_for(example: str) -> None:
    router, prefill, pool = (settings(example, name) for name in ("router", "prefill", "pool"))
    for pod in pods(of_example(example)):
        grace = pod.spec.get("terminationGracePeriodSeconds")
        if pod.component == "router":
            (container,) = pod.spec["containers"]
            assert grace >= router.drain_s + int(container["lifecycle"]["preStop"]["exec"]["command"][1]) + 15
        elif pod.component == "prefill":
            assert grace >= prefill.drain_s + 15
        elif pod.component == "decode":
            (container,) = pod.spec["containers"]
            waits = float(container["lifecycle"]["preStop"]["exec"]["command"][-1])
            # Telling Ray takes up to 15 s of it.
            assert grace >= 15 + waits > pool.drain_s + 15
        elif pod.component == "ray-head":
            assert grace >= pool.drain_s + 40


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_role_has_a_disruption_budget_that_names_a_number(example: str) -> None:
    found = list(pods(of_example(example)))
    budgets = of_kind(of_example(example), "PodDisruptionBudget")
    covered = {p.component for p in found for b in budgets if selects(b["spec"]["selector"], p.labels)}
    assert covered == {"router", "prefill", "decode"}
    for budget in budgets:
        (owner,) = {p.owner["kind"] for p in found if selects(budget["spec"]["selector"], p.labels)}
        # Only what has a scale can be counted by Kubernetes: of the others a number has to stay.
        key = "maxUnavailable" if owner == "Deployment" else "minAvailable"
        assert isinstance(budget["spec"][key], int)
        assert not {"maxUnavailable", "minAvailable"} - {key} & budget["spec"].keys()
    none = of_kind(rendered(example, router={"maxUnavailable": 0}), "PodDisruptionBudget")
    (zero,) = [budget for budget in none if budget["metadata"]["name"] == "demo-baton-router"]
    assert zero["spec"]["maxUnavailable"] == 0


@pytest.mark.parametrize("example", EXAMPLES)
def test_pods_keep_to_the_restricted_standard(example: str) -> None:
    """Kubernetes' documentation, "Pod Security Standards", restricted; and a read-only root."""
    for pod in pods(of_example(example)):
        of_pod = pod.spec["securityContext"]
        assert of_pod["runAsNonRoot"] is True
        assert of_pod["runAsUser"] > 0
        assert of_pod["seccompProfile"]["type"] == "RuntimeDefault"
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.spec.keys()
        allowed = {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}
        if example == "one-gpu-node":
            # Which the chart's README names as the exception.
            allowed |= {"hostPath"}
        for volume in pod.spec.get("volumes", []):
            assert volume.keys() - {"name"} <= allowed
        for container in pod.containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
            assert mounts <= {volume["name"] for volume in pod.spec["volumes"]}
        if pod.component != "ray-head" or example != "autoscaled":
            assert pod.spec["automountServiceAccountToken"] is False


def exported(folder: Path) -> dict[str, set[str]]:
    """Labels of the metrics as Prometheus sees them, by name: of a router, and of Ray's nodes."""
    reader = PrometheusMetricReader()
    meter = MeterProvider(metric_readers=[reader]).get_meter("baton")
    CertificateWatch(Authority(folder).issue("router"), meter)
    metrics = RouterMetrics(meter)
    metrics.watch(CostModel())
    metrics.watch_load(lambda: [1.0], lambda: 1)
    metrics.placed("remote", "normal", 0.1)
    metrics.regretted("remote", 1.0)
    metrics.shed("queue")
    found = {s.name: set(s.labels) for family in reader._collector.collect() for s in family.samples}
    # What Prometheus' operator adds.
    scraped = {"namespace", "pod", "job"}
    found = {name: labels | scraped | {"service"} for name, labels in found.items()}
    of_ray = {f"ray_baton_worker_{name}": {"worker", "role"} | scraped for name in _GAUGES}
    return found | of_ray | {"up": scraped | {"service"}}


def queries() -> Iterator[str]:
    """As Prometheus gets them."""
    objects = of_example("autoscaled")
    for rules in of_kind(objects, "PrometheusRule"):
        yield from (rule["expr"] for group in rules["spec"]["groups"] for rule in group["rules"])
    for scaled in of_kind(objects, "ScaledObject"):
        yield from (trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"])


def test_alerts_and_autoscalers_ask_for_metrics_and_labels_that_exist(tmp_path: Path) -> None:
    known, asked = exported(tmp_path), set()
    for query in queries():
        selectors = re.findall(r"(\w+)\{([^}]*)\}", query)
        assert selectors, query
        for name, matchers in selectors:
            labels = set(re.findall(r"(\w+)=", matchers)) | set(re.findall(r"by \((\w+)\)", query))
            assert name in known, query
            assert labels <= known[name], query
            asked.add(name)
    assert len(asked) == 13


def test_queries_are_of_the_service_that_is_scraped() -> None:
    services = {each["metadata"]["name"] for each in of_kind(of_example("autoscaled"), "Service")}
    named = [re.findall(r'service="([^"]*)"', query) for query in queries()]
    assert {name for names in named for name in names} == {"demo-baton-http"} < services


def test_queries_of_ray_are_of_the_release_that_asks() -> None:
    (monitor,) = (each["metadata"] for each in of_kind(of_example("autoscaled"), "PodMonitor"))
    of_ray = [query for query in queries() if "ray_baton" in query]
    assert len(of_ray) == 2
    for query in of_ray:
        selectors = re.findall(r"ray_baton_\w+\{([^}]*)\}", query)
        assert selectors
        for selector in selectors:
            # The operator's label of what a PodMonitor has found.
            assert f'job="prod/{monitor["name"]}"' in selector


def test_each_alert_has_its_section_in_the_guide() -> None:
    rules = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    guide = Path(CHART.parents[2] / "docs" / "deployment.md").read_text()
    assert set(re.findall(r"^### (Baton\w+)$", guide, re.MULTILINE)) == alerts


@pytest.mark.parametrize("role", ["router", "prefill"])
@pytest.mark.parametrize("kind", ["hpa", "keda"])
def test_an_autoscaler_has_the_number_for_itself(role: str, kind: str) -> None:
    metrics = {"serviceMonitor": {"enabled": kind == "keda"}}
    objects = rendered("defaults", metrics=metrics, **{role: {"autoscaling": {"kind": kind}}})
    (deployment,) = [d for d in of_kind(objects, "Deployment") if d["metadata"]["name"].endswith(f"-{role}")]
    assert "replicas" not in deployment["spec"]
    made = {"hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}[kind]
    (scaler,) = of_kind(objects, made)
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]


def test_one_worker_runs_per_pod_of_the_group_that_serves() -> None:
    groups = {
        "main": {"replicas": 2},
        "next": {"replicas": 3, "min": 0, "max": 4, "shm": "1Gi", "resources": {}},
    }
    objects = rendered("defaults", decode={"serving": "next", "groups": groups})
    (cluster,) = of_kind(objects, "RayCluster")
    offered = {
        group["groupName"]: group["rayStartParams"]["resources"]
        for group in cluster["spec"]["workerGroupSpecs"]
    }
    assert offered == {
        "main": "'{\"baton_decode_main\": 1}'",
        "next": "'{\"baton_decode_next\": 1}'",
    }
    pool = tomllib.loads(config_of(objects))["pool"]
    assert (pool["decode"], pool["decode_resources"]) == (3, ["baton_decode_next=1"])


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_pool_sees_the_ray_that_it_joins(example: str) -> None:
    # ray.init() looks for the raylet among the processes, and then for its socket below /tmp/ray. Beside its
    # autoscaler KubeRay mounts a volume "ray-logs" there, unless one is there already.
    (head,) = [pod for pod in pods(of_example(example)) if pod.component == "ray-head"]
    assert head.spec["shareProcessNamespace"] is True
    for path, volume in {"/tmp": "tmp", "/tmp/ray": "ray-logs"}.items():
        at_path = {
            container["name"]: [
                mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == path
            ]
            for container in head.containers
        }
        assert at_path == {"ray-head": [volume], "pool": [volume]}


@pytest.mark.parametrize("example", EXAMPLES)
def test_rays_autoscaler_reads_what_the_groups_pods_offer(example: str) -> None:
    (cluster,) = of_kind(of_example(example), "RayCluster")
    named = cluster | {"metadata": cluster["metadata"] | {"namespace": "any"}}
    read = _derive_autoscaling_config_from_ray_cr(named)["available_node_types"]
    assert read["headgroup"]["resources"]["CPU"] == 0
    groups = {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}
    assert read.keys() == {"headgroup", *groups}
    for name, group in groups.items():
        assert read[name]["resources"][f"baton_decode_{name}"] == 1
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert read[name]["resources"].get("GPU", 0) == int(limits.get("nvidia.com/gpu", 0))
        assert (read[name]["min_workers"], read[name]["max_workers"]) == (
            group["minReplicas"],
            group["maxReplicas"],
        )
