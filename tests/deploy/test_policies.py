"""Who reaches whom by the chart's NetworkPolicies, and who has to by the code."""

from __future__ import annotations

from itertools import product
from urllib.parse import urlsplit

import pytest

from tests.deploy.chart_settings import settings
from tests.deploy.manifests import EXAMPLES, Object, Pod, of_example, of_kind, pods, rendered, selects


def reachable(policies: list[Object], source: Pod | None, target: Pod) -> set[int] | None:
    """Ports that policies let source (None: anybody else) reach on target; None stands for all ports."""
    allowed = ports_of(policies, "Ingress", target, source)
    if source is None or allowed == set():
        return allowed
    out = ports_of(policies, "Egress", source, target)
    if allowed is None or out is None:
        return out if allowed is None else allowed
    return allowed & out


def ports_of(policies: list[Object], direction: str, pod: Pod, peer: Pod | None) -> set[int] | None:
    """Ports of the rules in one direction; None where nothing is restricted, or all ports are named."""
    of_pod = [p for p in policies if selects(p["spec"]["podSelector"], pod.labels)]
    if not of_pod:
        return None
    found: set[int] = set()
    for policy in of_pod:
        for rule in policy["spec"].get(direction.lower(), []):
            peers = rule.get("from" if direction == "Ingress" else "to")
            if peers is None or any(is_peer(each, peer) for each in peers):
                if "ports" not in rule:
                    return None
                found |= {port["port"] for port in rule["ports"]}
    return found


def is_peer(each: Object, peer: Pod | None) -> bool:
    if "namespaceSelector" in each:
        return peer is None
    return peer is not None and selects(each["podSelector"], peer.labels)


# Who dials whom, by the code: routers their workers, prefill workers the decode workers, all of them Redis.
EDGES = {
    ("router", "prefill"): {50060},
    ("router", "decode"): {50060},
    ("prefill", "decode"): {50060},
    ("router", "redis"): {6379},
    ("prefill", "redis"): {6379},
    ("decode", "redis"): {6379},
    ("ray-head", "redis"): {6379},
    ("decode", "ray-head"): None,
    ("ray-head", "decode"): None,
    ("decode", "decode"): None,
    ("test", "router"): {50051, 8000},
    # The doors are for everybody, the release's own pods among them.
    ("prefill", "router"): set(),
    ("decode", "router"): set(),
}


@pytest.mark.parametrize("example", ["defaults", "laptop-cpu", "one-gpu-node", "autoscaled"])
def test_policies_allow_what_the_code_dials_and_nothing_else(example: str) -> None:
    policies = of_kind(of_example(example), "NetworkPolicy")
    found = list(pods(of_example(example)))
    served = [pod for pod in found if pod.component != "test"]
    seen = set()
    for source, target in product(found, served):
        edge = (source.component, target.component)
        ports = reachable(policies, source, target)
        # 443 is the way to the hub while a model is pulled; nobody of ours listens there.
        seen.add(edge)
        assert (ports if ports is None else ports - {443, 6443}) == EDGES.get(edge, set()), edge
    assert seen >= EDGES.keys()
    for target in served:
        outside = reachable(policies, None, target)
        public = {50051, 8000} if target.component == "router" else set()
        is_watched = example == "autoscaled" and target.component in ("ray-head", "decode")
        assert outside is not None
        assert outside <= public | ({8080, 8265} if is_watched else set()), target.component


def test_with_nixl_the_two_that_move_kv_may_use_any_port_of_each_other() -> None:
    policies = of_kind(of_example("many-nodes-rdma"), "NetworkPolicy")
    found = {pod.component: pod for pod in pods(of_example("many-nodes-rdma"))}
    assert reachable(policies, found["prefill"], found["decode"]) is None
    assert reachable(policies, found["decode"], found["prefill"]) is None
    assert reachable(policies, found["router"], found["decode"]) == {50060}


@pytest.mark.parametrize("example", EXAMPLES)
def test_clients_can_be_named(example: str) -> None:
    named = {"clients": {"app": {"namespaceSelector": {}}}}
    objects = rendered(example, networkPolicy=named)
    (policy,) = [p for p in of_kind(objects, "NetworkPolicy") if p["metadata"]["name"].endswith("-router")]
    (rule,) = policy["spec"]["ingress"]
    assert {"namespaceSelector": {}} in rule["from"]


DNS, HUB, KUBERNETES = 53, 443, 6443


@pytest.mark.parametrize("example", EXAMPLES)
def test_pods_call_nothing_outside_but_what_they_need(example: str) -> None:
    policies = of_kind(of_example(example), "NetworkPolicy")
    found = [pod for pod in pods(of_example(example)) if pod.component not in ("test", "redis")]
    registry = urlsplit(settings(example, "router").redis_url)
    for pod in found:
        wanted = {DNS}
        if registry.hostname != "demo-baton-redis":
            wanted |= {registry.port}
        # Such a name is looked up, a folder is not.
        if not settings(example, "router").model.startswith("/"):
            wanted |= {HUB}
        if pod.component == "ray-head" and example == "autoscaled":
            wanted |= {HUB, KUBERNETES}
        assert ports_of(policies, "Egress", pod, None) == wanted, pod.component
    assert {pod.component for pod in found} == {"router", "prefill", "decode", "ray-head"}
