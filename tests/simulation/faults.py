"""What each kind of fault does to the cluster, and how it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.virtual_loop import State

if TYPE_CHECKING:
    from tests.simulation.cluster import SimCluster
    from tests.simulation.plan import Fault


def begin(fault: Fault, cluster: SimCluster) -> None:
    """The fault happens."""
    kind = fault.kind
    if kind in ("crash", "gone"):
        cluster.kill(fault.target[0], silently=kind == "gone")
    elif kind == "retire":
        cluster.retirements.begin(fault.target[0], fault.amount, fault.lasts_s)
    elif kind == "strike":
        cluster.strike(fault)
    elif kind in ("pause", "slow"):
        _hamper(fault, cluster)
    elif kind.startswith("registry"):
        _registry(kind, cluster)
    elif kind == "reset":
        for connection in cluster.net.between(*fault.target):
            connection.reset()
    elif kind == "frames":
        cluster.around.frame_faults.share[fault.target[0], fault.target[1]] = fault.amount
    else:
        _link(fault, cluster)


def end(fault: Fault, cluster: SimCluster) -> None:
    """The fault is over; what it broke may stay broken."""
    kind = fault.kind
    if kind in ("crash", "gone"):
        cluster.restart(fault.target[0])
    elif kind == "pause":
        cluster.resume(fault.target[0])
    elif kind == "slow":
        cluster.nodes[fault.target[0]].slowness = 1.0
    elif kind.startswith("registry"):
        cluster.around.registry.heal()
    elif kind == "frames":
        cluster.around.frame_faults.share.pop((fault.target[0], fault.target[1]), None)
    elif kind not in ("reset", "strike", "retire"):
        for source, target in _directions(fault):
            cluster.net.link(source, target).heal()


def _hamper(fault: Fault, cluster: SimCluster) -> None:
    node = cluster.nodes[fault.target[0]]
    if fault.kind == "slow":
        node.slowness = fault.amount
    elif node.process.state is State.RUNNING:
        if fault.lasts_s > cluster.plan.lease_ttl_s and node.ledger().get("leases"):
            cluster.around.hit("a pause outlived the lease")
        node.process.pause()


def _registry(kind: str, cluster: SimCluster) -> None:
    registry = cluster.around.registry
    if kind == "registry_down":
        registry.is_down = True
    elif kind == "registry_stale":
        registry.go_stale(cluster.now())
    else:
        registry.empty()


def _link(fault: Fault, cluster: SimCluster) -> None:
    for source, target in _directions(fault):
        link = cluster.net.link(source, target)
        if fault.kind == "delay":
            link.extra_s = fault.amount
        elif fault.kind == "clog":
            link.is_clogged = True
        else:
            link.is_silent = True


def _directions(fault: Fault) -> list[tuple[str, str]]:
    one, other = fault.target
    return [(one, other), (other, one)] if fault.kind == "partition" else [(one, other)]
