"""One simulated run: nodes, clients and faults on one loop, and the laws it must obey.

Phases: faults for the plan's fault_phase_s, then everything is healed, then all requests must end,
something advancing in every LIVENESS_S, all must come to rest, and new requests be answered.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from baton.v1 import common_pb2
from tests.simulation import faults
from tests.simulation.calls import Caller
from tests.simulation.client import SLOW_WINDOW_BYTES, Client, SimRouters
from tests.simulation.explained import Explained
from tests.simulation.net import Connection, Network
from tests.simulation.nodes import DecodeNode, Node, PrefillNode, Surroundings, WorkerNode, tokenizer
from tests.simulation.plan import NUM_PROBES, Fault, Plan, RequestPlan, probe
from tests.simulation.rest import unrest_of
from tests.simulation.retirement import Retirements
from tests.simulation.router_node import RouterNode
from tests.simulation.routing import key_of
from tests.simulation.sometimes import Sometimes
from tests.simulation.trace import Trace
from tests.simulation.virtual_loop import Process, State, VirtualLoop
from tests.simulation.witness import LeaseWitness

LIVENESS_S = 20.0
# How soon a cancel has reached both legs, and how soon after that nothing is held: a running step
# may have to end. Both below every lease, so that expiry cannot hide a missing release.
RELEASE_S, CLEAN_UP_S = 0.4, 1.2
# A strike is followed by another one if nothing has been resumed by then; none comes in the last seconds.
STRIKES_APART_S, STRIKES_END_S = 1.0, 5.0
# What a request may end with. Anything else is a defect.
OUTCOMES = frozenset(
    {
        "finished",
        "cancelled",
        "DEADLINE_EXCEEDED",
        "UNAVAILABLE",
        "PEER_LOST",
        "KV_TRANSFER_FAILED",
        "OVERLOADED",
    }
)


class SimCluster:
    """Everything of one run; also the tap on its network."""

    def __init__(self, plan: Plan, loop: VirtualLoop) -> None:
        self.plan = plan
        self.now = loop.time
        self.defects: list[str] = []
        self.trace = Trace(loop.time)
        self.sometimes = Sometimes()
        self._explained = Explained(self.sometimes.hit, plan)
        rng = random.Random(f"{plan.seed}/latency")
        self.net = Network(lambda source, target: rng.choice((0.0005, 0.01, 0.05)), str(plan.seed))
        self.around = Surroundings(plan, self.net, self, self.sometimes.hit, self.fail)
        self.nodes: dict[str, Node] = {}
        self._by_request: dict[str, Client] = {}
        self.past: list[Process] = []
        self.loop = self._loop = loop
        self.retirements = Retirements(self, partial(self.kill, silently=False))
        self._lives: dict[str, int] = {}
        self._deaths: list[float] = []
        self._witnesses: dict[str, LeaseWitness] = {}
        self._people = Process("client")
        self._failed = asyncio.Event()

    async def run(self) -> None:
        """Runs all phases; what is wrong is in `defects` afterwards."""
        for worker in self.plan.workers:
            self._boot(worker.name)
        for router in self.plan.routers:
            self._boot(router)
        for request in self.plan.requests:
            self._send(request)
        for fault in self.plan.faults:
            self._loop.call_at(fault.at, self._begin, fault)
            self._loop.call_at(min(fault.at + fault.lasts_s, self.plan.fault_phase_s), self._end, fault)
        if await self._passed(self.plan.fault_phase_s + 0.001):
            self._heal()
            await self._answered()
            if await self._rests("after the faults", LIVENESS_S):
                self._probe()
                await self._answered()
                # No fault is left that clean-up could have to wait for.
                await self._rests("after the probes", CLEAN_UP_S)
                self._check_probes()
        self._collect_failures()

    def kill(self, name: str, *, silently: bool) -> None:
        """A node's process dies, or the machine with it."""
        process = self.nodes[name].process
        if process.state is not State.DEAD:
            process.kill()
            self._deaths.append(self.now())
            self.net.kill(process, silently=silently)
            self.past.append(process)

    def strike(self, fault: Fault) -> None:
        """Kills a worker of a role at a moment when it has work, and restarts it.

        A strike after which nothing is resumed was for nothing, and another one follows.
        """
        if self.now() > self.plan.fault_phase_s - STRIKES_END_S:
            return
        busy = [
            name
            for name, node in self.nodes.items()
            if name.startswith(fault.target[0])
            and node.process.state is State.RUNNING
            and node.ledger()["requests_running"]
        ]
        if busy:
            self.trace.note(busy[0], "struck down")
            self.kill(busy[0], silently=False)
            self._loop.call_later(fault.lasts_s, self.restart, busy[0])
            self._loop.call_later(fault.lasts_s + STRIKES_APART_S, self._strike_again, fault)
        else:
            self._loop.call_later(0.05, self.strike, fault)

    def restart(self, name: str) -> None:
        """A dead node comes back at its address, as a new incarnation."""
        if self.nodes[name].process.state is State.DEAD:
            self.sometimes.hit("restarted at the same address")
            self._boot(name)

    def resume(self, name: str) -> None:
        """A paused node goes on."""
        process = self.nodes[name].process
        if process.state is State.PAUSED:
            process.resume(self._loop)

    def read(self, connection: Connection, from_caller: bool, data: bytes, message: Any) -> None:
        """Tap: a process read a message."""
        caller, server = connection.names
        reader, writer = (server, caller) if from_caller else (caller, server)
        self.trace.message(reader, writer, connection.kind, data, message)
        self._guard(self._account, connection, from_caller, message)

    def sent(self, connection: Connection, message: Any) -> None:
        """Tap: a caller sends a message."""
        self._guard(self.retirements.sent, connection, message)
        if connection.kind == "decode" and message.WhichOneof("message") == "reserve":
            self._guard(self._check_resume, message.reserve.sequence)

    def answered(self, connection: Connection, message: Any) -> None:
        """Tap: a server sends a message."""
        self._guard(self.retirements.answered, connection, message)
        if connection.kind not in ("kv", "decode"):
            return
        witness = self._witnesses[connection.names[1]]
        match message.WhichOneof("message"):
            case "committed":
                self._guard(witness.committed, connection)
                self._slots_ended(connection)
            case "gone":
                self._guard(witness.refused, connection, message.gone)
            case "granted":
                self._granted(connection, message.granted.slots)
            case "lease_outcome":
                self._guard(witness.told, message.lease_outcome)

    @property
    def clients(self) -> list[Client]:
        """All clients, in the order of their requests."""
        return list(self._by_request.values())

    def ledgers(self) -> dict[str, dict[str, int]]:
        """What each node holds for requests."""
        return {name: node.ledger() for name, node in self.nodes.items()}

    def fail(self, defect: str) -> None:
        """A law is broken; the run ends."""
        self.defects.append(defect)
        self.trace.note("", f"DEFECT {defect}")
        self._failed.set()

    def _strike_again(self, fault: Fault) -> None:
        if not self.sometimes.num_resumes:
            # A short one: what is lost finds its way back before its router gives it up.
            self.strike(replace(fault, lasts_s=min(fault.lasts_s, 0.1)))

    def _account(self, connection: Connection, from_caller: bool, message: Any) -> None:
        self.sometimes.read(connection, from_caller, message)
        caller, name = connection.names
        if connection.kind == "generate":
            self._generated(name, from_caller, message)
        self.retirements.read(connection, from_caller, message)
        if from_caller and connection.kind == "decode":
            self._witnesses[name].command(message)
        elif from_caller and connection.kind == "kv":
            self._witnesses[name].write(connection, message)
            if not isinstance(message, memoryview) and message.WhichOneof("message") == "quiet":
                self._slots_ended(connection)
        node = self.nodes.get(name if from_caller else caller)
        if isinstance(node, WorkerNode):
            node.check_blocks()
        elif isinstance(node, RouterNode):
            node.check_counters(name, message)

    def _generated(self, router: str, from_caller: bool, message: Any) -> None:
        if from_caller:
            self._explained.arrived(router, message, self.now())
        elif message.WhichOneof("payload") == "summary":
            self._explained.finished(router, message.summary)

    def _granted(self, connection: Connection, slots: Sequence[int]) -> None:
        name = connection.names[1]
        node = self.nodes[name]
        assert isinstance(node, DecodeNode)
        if node.arena is not None:
            node.arena.granted(self._witnesses[name].attempt_of(connection), slots)

    def _slots_ended(self, connection: Connection) -> None:
        name = connection.names[1]
        node = self.nodes[name]
        assert isinstance(node, DecodeNode)
        if node.arena is not None:
            node.arena.ended(self._witnesses[name].attempt_of(connection))

    def _check_resume(self, sequence: common_pb2.Sequence) -> None:
        """A request is its tokens: an attempt begins with all that the client has."""
        client = self._by_request[sequence.request_id]
        output = list(sequence.token_ids)[sequence.num_prompt_tokens :]
        assert output[: len(client.token_ids)] == client.token_ids, (
            f"{sequence.request_id} was resumed with {output}; its client has {client.token_ids}"
        )

    def _guard(self, check: Callable[..., None], *args: Any) -> None:
        try:
            check(*args)
        except AssertionError as error:
            self.fail(str(error))

    def _boot(self, name: str) -> None:
        life = self._lives[name] = self._lives.get(name, -1) + 1
        node = self.nodes[name] = self._node(name, life)
        if isinstance(node, DecodeNode):
            ttl_s = self.plan.lease_ttl_s
            self._witnesses[name] = LeaseWitness(name, node.incarnation, ttl_s, self.now)
        self.trace.note(name, f"life {life} begins")

    def _node(self, name: str, life: int) -> Node:
        for worker in self.plan.workers:
            if worker.name == name:
                kind = PrefillNode if worker.role == "prefill" else DecodeNode
                return kind(worker, life, self.around)
        return RouterNode(name, life, self.around)

    def _send(self, request: RequestPlan) -> None:
        # The SDK begins at the router it is told, and goes on at the others.
        names = [request.router, *(name for name in self.plan.routers if name != request.router)]
        window_bytes = SLOW_WINDOW_BYTES if request.patience_s else None
        caller = Caller(self.net, self._people, self)
        routers = SimRouters(
            names,
            caller,
            window_bytes,
            partial(self.sometimes.hit, "an answer went on at another router"),
            key_of(request.tenant),
        )
        rng = random.Random(f"{self.plan.seed}/client/{request.request_id}")
        ended = partial(self._ended, request)
        client = Client(request, routers, tokenizer(), rng, ended, rope_steps=self.plan.rope_steps)
        self._by_request[request.request_id] = client
        self._people.spawn(self._follow(client), f"client-{request.request_id}")

    async def _follow(self, client: Client) -> None:
        try:
            await client.run()
        except AssertionError as error:
            self.fail(str(error))

    def _ended(self, request: RequestPlan, what: str) -> None:
        self.trace.note("client", what)
        outcome = what.split()[1]
        # Two deaths under a request make it suspect; two more, in steps of its own, convict it.
        is_convicted = outcome == "POISON_REQUEST" and sum(at > request.at for at in self._deaths) >= 4
        if outcome not in OUTCOMES and not is_convicted:
            self.fail(f"a request ended badly: {what}")
        points = {
            "cancelled": "client cancelled",
            "DEADLINE_EXCEEDED": "deadline passed",
        }
        if outcome == "OVERLOADED":
            is_strict = request.ttft_objective_ms is not None
            reason = self._by_request[request.request_id].reason
            self._guard(partial(self._explained.refused, is_strict=is_strict), reason)
        if outcome == "cancelled" and request.request_id.startswith("probe"):
            self._loop.call_later(RELEASE_S, self._check_released, request.request_id)
        if outcome in points:
            self.sometimes.hit(points[outcome])
        if outcome == "UNAVAILABLE" and request.patience_s:
            self.sometimes.hit("a slow reader was cut off")
        if outcome == "finished" and len(self.sometimes.attempts_of(request.request_id)) > 2:
            self.sometimes.hit("resumed twice, then finished")

    def _check_released(self, request_id: str) -> None:
        """A cancel has reached both legs, where no fault was in its way."""
        attempts = self.sometimes.attempts_of(request_id)
        for node in self.nodes.values():
            if isinstance(node, WorkerNode) and any(a in node.worker._attempts for a in attempts):
                self.fail(f"{node.name} still has {request_id}, {RELEASE_S:g} s after it was cancelled")

    def _begin(self, fault: Fault) -> None:
        self.trace.note(">".join(fault.target), f"{fault.kind} begins")
        faults.begin(fault, self)

    def _end(self, fault: Fault) -> None:
        self.trace.note(">".join(fault.target), f"{fault.kind} ends")
        faults.end(fault, self)

    def _heal(self) -> None:
        self.trace.note("", "everything is healed")
        self.net.heal()
        self.around.registry.heal()
        self.around.frame_faults.share.clear()
        for name, node in list(self.nodes.items()):
            node.slowness = 1.0
            self.resume(name)
            self.restart(name)

    async def _passed(self, at: float) -> bool:
        """Waits until then; False as soon as a law is broken."""
        try:
            async with asyncio.timeout_at(at):
                await self._failed.wait()
        except TimeoutError:
            return True
        return False

    async def _answered(self) -> None:
        """Waits until every request has its outcome, for as long as any of them advances."""
        seen, since = self._progress(), self.now()
        while not all(client.outcome for client in self.clients) and self.now() - since < LIVENESS_S:
            if not await self._passed(self.now() + 0.1):
                return
            if self._progress() != seen:
                seen, since = self._progress(), self.now()

    def _progress(self) -> tuple[int, int]:
        """Requests that have ended, and tokens that clients have."""
        ended = sum(bool(client.outcome) for client in self.clients)
        return ended, sum(len(client.token_ids) for client in self.clients)

    async def _rests(self, when: str, limit_s: float) -> bool:
        deadline = self.now() + limit_s
        while (unrest := unrest_of(self.plan, self.nodes, self.clients)) and self.now() < deadline:
            if not await self._passed(self.now() + 0.25):
                return False
        if unrest:
            self.fail(f"not at rest {limit_s:g} s {when}: {unrest}")
        return not unrest

    def _probe(self) -> None:
        """New requests on the healed cluster, no more than any queue takes; every other one is cancelled."""
        for index in range(NUM_PROBES):
            request = probe(self.plan, index, self.now() + 0.1 * index)
            self._send(request)

    def _check_probes(self) -> None:
        for client in self.clients:
            is_strict = client.plan.ttft_objective_ms is not None
            due = ("OVERLOADED",) if is_strict else ("finished", "cancelled")
            if client.plan.request_id.startswith("probe") and client.outcome not in ("", *due):
                self.fail(f"with everything healed, {client.plan.request_id} ended {client.outcome}")

    def _collect_failures(self) -> None:
        processes = [node.process for node in self.nodes.values()] + self.past + [self._people]
        for failure in [failure for process in processes for failure in process.failures]:
            self.fail(failure)
        for error in self._loop.errors:
            self.fail(error)

    async def dissolve(self) -> None:
        """Ends every task, also those of the dead, so that nothing runs after the run."""
        self.net.close()
        for process in [*(node.process for node in self.nodes.values()), *self.past, self._people]:
            process.resume(self._loop)
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=600)
