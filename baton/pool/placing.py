"""On which node the next worker goes, and why there is none: a plain core without Ray.

Each worker has a placement group of its own, so that its room is free as soon as it is gone. Ray's
strategies are rules over the bundles of one group; here they are rules over the workers of a role.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

STRATEGIES: Final = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
# Ray gives every node this label.
NODE_ID_LABEL: Final = "ray.io/node-id"
MAX_NODES_NAMED: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A living node of the cluster.

    labels: its Ray labels.
    free, total: resources by name.
    """

    node_id: str
    address: str
    labels: Mapping[str, str] = field(default_factory=dict)
    free: Mapping[str, float] = field(default_factory=dict)
    total: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What one worker needs.

    resources: amounts by name.
    labels: label selectors by key: "a", "!a", "in(a,b)" or "!in(a,b)".
    """

    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(f"{name} {amount:g}" for name, amount in self.resources.items()) or "nothing"

    def copies_on(self, node: Node) -> float:
        """How many such workers the free resources of a node hold; the labels are not looked at."""
        rooms = [node.free.get(name, 0.0) / amount for name, amount in self.resources.items()]
        return min(rooms, default=float("inf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a group may be made: on one node, or anywhere but on some.

    node_id: the node, or None for any.
    """

    node_id: str | None = None
    avoided: tuple[str, ...] = ()

    def selector(self, labels: Mapping[str, str]) -> dict[str, str]:
        """Ray's label selector for it, on top of those given."""
        if self.node_id is not None:
            return {**labels, NODE_ID_LABEL: self.node_id}
        if self.avoided:
            return {**labels, NODE_ID_LABEL: f"!in({','.join(self.avoided)})"}
        return dict(labels)


def choose(strategy: str, ask: Ask, nodes: Sequence[Node], ours: Mapping[str, int]) -> Target:
    """The best node with room; without one, the widest target that the strategy allows.

    A group waits there: whoever adds nodes to a cluster looks at the groups that wait.

    ours: how many workers of this role each node has already, by node id.
    """
    fitting = [node for node in nodes if _obstacle(strategy, ask, node, ours) is None]
    if fitting:
        towards_ours = 1 if strategy.endswith("PACK") else -1
        best = max(
            fitting,
            key=lambda node: (towards_ours * ours.get(node.node_id, 0), ask.copies_on(node), node.node_id),
        )
        return Target(node_id=best.node_id)
    taken = tuple(sorted(node_id for node_id, number in ours.items() if number))
    if strategy == "STRICT_PACK" and taken:
        return Target(node_id=taken[0])
    return Target(avoided=taken if strategy == "STRICT_SPREAD" else ())


def is_allowed(strategy: str, node_id: str, ours: Mapping[str, int]) -> bool:
    """Whether a strict strategy lets the next worker go there."""
    others = {other for other, number in ours.items() if number}
    if strategy == "STRICT_PACK":
        return not others or node_id in others
    return strategy != "STRICT_SPREAD" or node_id not in others


def why_not(strategy: str, ask: Ask, nodes: Sequence[Node], ours: Mapping[str, int]) -> str:
    """What is asked and what the nodes have, in words."""
    labels = ", ".join(f"{key}={value}" for key, value in ask.labels.items())
    asked = f"{ask}{f' on a node with {labels}' if labels else ''} ({strategy})"
    named = [
        f"{node.address} {_obstacle(strategy, ask, node, ours) or 'has room'}"
        for node in nodes[:MAX_NODES_NAMED]
    ]
    more = [f"{len(nodes) - MAX_NODES_NAMED} more nodes"] if len(nodes) > MAX_NODES_NAMED else []
    return f"it asks for {asked}; {'; '.join([*named, *more]) or 'there is no node'}"


def _obstacle(strategy: str, ask: Ask, node: Node, ours: Mapping[str, int]) -> str | None:
    """Why a node cannot take the worker; None if it can."""
    for key, wanted in ask.labels.items():
        value = node.labels.get(key)
        if not _matches(wanted, value):
            return f"has no label {key}" if value is None else f"has {key}={value}"
    if not is_allowed(strategy, node.node_id, ours):
        return "has a worker already" if strategy == "STRICT_SPREAD" else "is not the node of the others"
    for name, amount in ask.resources.items():
        free, total = node.free.get(name, 0.0), node.total.get(name, 0.0)
        if free < amount:
            return f"has {name} {free:g} of {total:g} free"
    return None


def _matches(wanted: str, value: str | None) -> bool:
    """Ray's rule for one label; a node without the label has no value, which only a negation takes."""
    if wanted.startswith("!"):
        return not _matches(wanted[1:], value)
    if wanted.startswith("in(") and wanted.endswith(")"):
        return value in [item.strip() for item in wanted[3:-1].split(",")]
    return value == wanted
