"""When a cluster is at rest: nothing is held for any request, and everybody knows everybody again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.simulation.client import Client
from tests.simulation.nodes import Node, PrefillNode, WorkerNode
from tests.simulation.plan import Plan
from tests.simulation.router_node import RouterNode

# Tasks that exist for one request; none may outlive it.
TRANSIENT = (
    "generation-",
    "transfer-",
    "kv-transfer-",
    "kv-answers-",
    "serve-kv",
    "serve-pair",
    "serve-generate",
)


def unrest_of(plan: Plan, nodes: Mapping[str, Node], clients: Sequence[Client]) -> str:
    """What is not as it was before the first request; empty when all is."""
    pending = [client.plan.request_id for client in clients if not client.outcome]
    if pending:
        return f"requests without an outcome: {' '.join(pending)}"
    held = {name: {k: v for k, v in node.ledger().items() if v} for name, node in nodes.items()}
    if any(held.values()):
        return f"held: { {name: counts for name, counts in held.items() if counts} }"
    rest = _Rest(plan, nodes)
    checks = (rest.tasks_left, rest.links_missing, rest.pairs_astray, rest.credit_astray, rest.caches_astray)
    return next((found for found in (check() for check in checks) if found), "")


class _Rest:
    def __init__(self, plan: Plan, nodes: Mapping[str, Node]) -> None:
        self._nodes = nodes
        self._routers = [node for node in nodes.values() if isinstance(node, RouterNode)]
        self._prefills = [node for node in nodes.values() if isinstance(node, PrefillNode)]
        self._has_digests = {worker.name: worker.has_digests for worker in plan.workers}
        self._num_decodes = sum(worker.role == "decode" for worker in plan.workers)

    def tasks_left(self) -> str:
        names = [name for node in self._nodes.values() for name in node.process.living()]
        left = [name for name in names if name.startswith(TRANSIENT)]
        return f"tasks: {' '.join(left)}" if left else ""

    def links_missing(self) -> str:
        for router in self._routers:
            ready = {link.info.incarnation for link in router.fleet.links if link.is_ready}
            for node in self._nodes.values():
                if isinstance(node, WorkerNode) and node.incarnation not in ready:
                    return f"{router.name} has no session with {node.name}"
        return ""

    def pairs_astray(self) -> str:
        """Every pair is reached but those that are refused; nothing is kept of decode workers that died."""
        for node in self._prefills:
            kept = (len(node.worker._pairs), node.transport.num_connections)
            due = (self._num_decodes, self._num_decodes if node.plan.has_digests else 0)
            if kept != due:
                return f"{node.name} has pairs, connections {kept}; {due} are due"
        for router in self._routers:
            for prefill in router.fleet.prefill_links():
                is_due = self._has_digests[prefill.name]
                for decode in router.fleet.decode_links():
                    if prefill.can_reach(decode.info.incarnation) != is_due:
                        return f"{prefill.name} reaches {decode.name}: {not is_due}, thinks {router.name}"
        return ""

    def credit_astray(self) -> str:
        for node in self._prefills:
            table = node.worker._credits
            known = sum(
                link.credit
                for router in self._routers
                for link in router.fleet.prefill_links()
                if link.info.incarnation == node.incarnation
            )
            if table.num_free + known != table.budget:
                return f"{node.name}: {table.num_free} free, routers know of {known} of {table.budget}"
        return ""

    def caches_astray(self) -> str:
        """Every router's index of prefixes has what is in the workers' caches."""
        for router in self._routers:
            holders = router.core.outlook.prefixes._holders
            living = {node.incarnation for node in self._nodes.values()}
            if not holders.keys() <= living:
                return f"{router.name} has prefixes of {len(holders.keys() - living)} workers that are gone"
            for node in self._nodes.values():
                if isinstance(node, WorkerNode):
                    stored = {block.key for block in node.engine.pool.stored()}
                    holder = holders.get(node.incarnation)
                    if holder is None or holder.keys != stored:
                        found = "nothing" if holder is None else len(holder.keys)
                        return f"{router.name} thinks that {node.name} has {found} of {len(stored)} prefixes"
        return ""
