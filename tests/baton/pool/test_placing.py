from __future__ import annotations

import pytest

from baton.pool.placing import Ask, Node, Target, choose, is_allowed, why_not

ONE_GPU = Ask(resources={"GPU": 1.0})


def node(name: str, gpus: float, *, of: float = 4.0, **labels: str) -> Node:
    return Node(node_id=name, address=f"10.0.0.{name}", labels=labels, free={"GPU": gpus}, total={"GPU": of})


@pytest.mark.parametrize(
    ("strategy", "ours", "wanted"),
    [
        # Three nodes with 1, 4 and 2 free GPUs: the emptiest first, where nothing else counts.
        ("PACK", {}, "2"),
        ("PACK", {"1": 1}, "1"),
        ("PACK", {"1": 1, "3": 2}, "3"),
        ("SPREAD", {}, "2"),
        ("SPREAD", {"2": 1}, "3"),
        ("SPREAD", {"1": 1, "2": 2, "3": 1}, "3"),
        ("STRICT_PACK", {}, "2"),
        ("STRICT_PACK", {"1": 3}, "1"),
        ("STRICT_SPREAD", {"2": 1}, "3"),
        ("STRICT_SPREAD", {"2": 1, "3": 1}, "1"),
    ],
)
def test_a_node_with_room_is_chosen_by_the_strategy(strategy, ours, wanted) -> None:
    nodes = [node("1", 1), node("2", 4), node("3", 2)]
    assert choose(strategy, ONE_GPU, nodes, ours) == Target(node_id=wanted)


@pytest.mark.parametrize(
    ("strategy", "ours", "wanted"),
    [
        ("PACK", {"1": 1}, Target()),
        ("SPREAD", {"1": 1}, Target()),
        ("STRICT_PACK", {}, Target()),
        ("STRICT_PACK", {"1": 1}, Target(node_id="1")),
        ("STRICT_SPREAD", {"1": 1}, Target(avoided=("1",))),
    ],
)
def test_without_room_it_waits_wherever_the_strategy_allows(strategy, ours, wanted) -> None:
    assert choose(strategy, ONE_GPU, [node("1", 0), node("2", 0.5)], ours) == wanted


def test_strict_strategies_rule_nodes_out() -> None:
    ours = {"1": 1, "2": 0}
    allowed = {
        strategy: [name for name in ("1", "2", "3") if is_allowed(strategy, name, ours)]
        for strategy in ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
    }
    assert allowed == {
        "PACK": ["1", "2", "3"],
        "SPREAD": ["1", "2", "3"],
        "STRICT_PACK": ["1"],
        "STRICT_SPREAD": ["2", "3"],
    }


@pytest.mark.parametrize(
    ("selector", "fitting"),
    [
        ("a", ["1"]),
        ("!a", ["2", "3"]),
        ("in(a,b)", ["1", "2"]),
        ("in(a, b)", ["1", "2"]),
        ("!in(a,b)", ["3"]),
    ],
)
def test_labels_select_nodes_as_ray_does(selector, fitting) -> None:
    nodes = [node("1", 1, zone="a"), node("2", 1, zone="b"), node("3", 1)]
    ask = Ask(resources={"GPU": 1.0}, labels={"zone": selector})
    found = [n.node_id for n in nodes if choose("PACK", ask, [n], {}) == Target(node_id=n.node_id)]
    assert found == fitting


def test_a_selector_keeps_the_labels_that_were_asked_for() -> None:
    labels = {"zone": "a"}
    assert Target().selector(labels) == {"zone": "a"}
    assert Target(node_id="n1").selector(labels) == {"zone": "a", "ray.io/node-id": "n1"}
    assert Target(avoided=("n1", "n2")).selector(labels) == {"zone": "a", "ray.io/node-id": "!in(n1,n2)"}


def test_what_is_missing_is_told_node_by_node() -> None:
    ask = Ask(resources={"GPU": 0.5, "seat": 1.0}, labels={"zone": "a"})
    nodes = [
        node("1", 0.25, zone="a"),
        node("2", 1, zone="b"),
        node("3", 1),
        node("4", 1, zone="a"),
        Node(node_id="5", address="10.0.0.5", labels={"zone": "a"}, free={"GPU": 1, "seat": 1}),
    ]
    assert why_not("STRICT_SPREAD", ask, nodes, {"5": 1}) == (
        "it asks for GPU 0.5, seat 1 on a node with zone=a (STRICT_SPREAD); "
        "10.0.0.1 has GPU 0.25 of 4 free; 10.0.0.2 has zone=b; 10.0.0.3 has no label zone; "
        "10.0.0.4 has seat 0 of 0 free; 10.0.0.5 has a worker already"
    )
    assert why_not("PACK", ONE_GPU, [], {}) == "it asks for GPU 1 (PACK); there is no node"
    many = why_not("PACK", ONE_GPU, [node(str(number), 0) for number in range(11)], {})
    assert many.endswith("10.0.0.7 has GPU 0 of 4 free; 3 more nodes")
