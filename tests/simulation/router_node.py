"""The router of the simulated cluster: its real inside and door, on simulated ports.

Owns what `python -m router` does for one life of it, and its counters' laws.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from baton.errors import Draining
from baton.v1 import common_pb2
from baton.v1.decode_service_pb2 import DecodeServiceSessionResponse
from baton.v1.inference_service_pb2 import GenerateRequest
from baton.v1.prefill_service_pb2 import PrefillServiceSessionResponse
from router.config import RouterConfig
from router.core import RouterCore
from router.decode_link import DecodeLink
from router.grammars import GrammarCheck
from router.inference import Inference
from router.learning.learned_edges import LearnedEdges
from router.prefill_link import PrefillLink
from router.retry_budget import RetryBudget
from router.service import InferenceServicer
from router.text import Text
from tests.router.tiny_text import at_once
from tests.simulation.calls import Caller, Method, ServerCall
from tests.simulation.dial import SimDialer
from tests.simulation.nodes import Node, Surroundings
from tests.simulation.routing import MAX_WAIT_S, tenants_of

EDGES = (8, 24)


class QuickEdges(LearnedEdges):
    """Edges that are looked at after a few prompts: a simulation has far fewer than production needs."""

    REVIEW_EVERY = 8

    def __init__(self, edges: tuple[int, ...], moved: Callable[[], None]) -> None:
        super().__init__(len(edges) + 1, edges, min_edge=2)
        self._moved = moved

    def observe(self, num_tokens: int, work_ms: float) -> None:
        super().observe(num_tokens, work_ms)
        if self._num_seen % self.REVIEW_EVERY:
            return
        before = self.edges()
        self._review()
        if self.edges() != before:
            self._moved()


class CountedBudget(RetryBudget):
    """Tells when a further attempt is taken."""

    def __init__(self, taken: Callable[[], None]) -> None:
        super().__init__()
        self._taken = taken

    def take(self) -> bool:
        self._taken()
        return super().take()


class RouterNode(Node):
    """A router with its public door."""

    def __init__(self, name: str, life: int, around: Surroundings) -> None:
        super().__init__(name, life, around)
        config = self._config()
        self.core = RouterCore.assemble(
            config,
            identity=self.identity(common_pb2.ROLE_ROUTER),
            registry=self.registry(),
            prefill_dialer=self._dialer("prefill", PrefillServiceSessionResponse.FromString),
            decode_dialer=self._dialer("decode", DecodeServiceSessionResponse.FromString),
            rng=self.rng,
        )
        if config.learn_buckets:
            self.core.outlook._edges = QuickEdges(EDGES, partial(around.hit, "buckets moved"))
        budget = CountedBudget(partial(around.hit, "a further attempt was taken from the budget"))
        self.core.dispatcher.retries = budget
        self.queue, self.fleet = self.core.queue, self.core.fleet
        self.inference = Inference(
            core=self.core,
            model=around.model,
            text=Text(around.model, at_once),
            grammars=GrammarCheck(None, at_once),
            rng=self.rng,
            tenants=tenants_of(around.plan.routing),
        )
        # The largest share of credit that each session with a prefill worker was told, by its link.
        self._shares: dict[PrefillLink, int] = {}
        generate: Any = InferenceServicer(self.inference).Generate
        self._server = self.serve(
            {"generate": Method(partial(_generate, generate, around.hit), GenerateRequest.FromString)}
        )
        self.process.spawn(self.fleet.run(), f"fleet-{name}")

    def retire(self, grace_s: float, left: Callable[[], None]) -> None:
        self.process.spawn(self._leave(grace_s, left), f"leave-{self.name}")

    async def _leave(self, grace_s: float, left: Callable[[], None]) -> None:
        await self.inference.handover.drain(self._server.stop, grace_s)
        self.core.close()
        left()

    def ledger(self) -> dict[str, int]:
        counts = {
            "requests": self.inference.num_requests,
            "explained": len(self.core.explanations._running),
            "queued": len(self.queue),
            "queued_tokens": sum(self.queue._num_tokens),
            "attempts": sum(link.num_attempts for link in self.fleet.links),
        }
        for link in self.fleet.links:
            for what, count in _counters(link).items():
                if what != "credit":
                    counts[what] = counts.get(what, 0) + count
        return counts

    def check_counters(self, worker: str, message: Any) -> None:
        """What is counted of a worker is never negative, and no more credit is held than was granted.

        message: what has come from it and is not handled yet.
        """
        for link in self.fleet.links:
            if link.name != worker:
                continue
            counts = _counters(link)
            assert min(counts.values()) >= 0, f"{self.name} counts of {worker}: {counts}"
            if isinstance(link, PrefillLink):
                self._check_credit(link, message)

    def _check_credit(self, link: PrefillLink, message: Any) -> None:
        kind = message.WhichOneof("message")
        if kind in ("credit_grant", "credit_reclaim"):
            share = getattr(message, kind).share_tokens
            self._shares[link] = max(share, self._shares.get(link, 0))
        # What a prompt has cost is granted anew just before the word of its token or end, and in between
        # it is counted twice.
        total = link.credit + link.spent - max(link._costs.values(), default=0)
        share = self._shares.get(link, 0)
        assert total <= share, f"{self.name} has {total} tokens of credit at {link.name}, of {share}"

    def _config(self) -> RouterConfig:
        plan, routing = self.around.plan, self.around.plan.routing
        return RouterConfig(
            model="tiny",
            max_queue=plan.max_queue,
            max_attempts=plan.max_attempts,
            resume_wait_s=3.0,
            write_timeout_s=4.0,
            bucket_edges=EDGES,
            max_wait_s=MAX_WAIT_S,
            placement=routing.placement,
            local_max_tokens=routing.local_max_tokens,
            learn_buckets=routing.learn_buckets,
            output_quantile=routing.output_quantile,
            itl_objective_ms=routing.itl_objective_ms,
        )

    def _dialer(self, kind: str, decode: Callable[[bytes], Any]) -> SimDialer:
        caller = Caller(self.around.net, self.process, self.around.tap)
        return SimDialer(kind, decode, caller, self.around.hit)


def _counters(link: Any) -> dict[str, int]:
    if isinstance(link, DecodeLink):
        own = link._own
        return {
            "asked": len(link._asked),
            "asked_blocks": sum(link._asked.values()),
            "held": len(own),
            "held_tokens": own.num_tokens,
            "growth_blocks": own.num_growth_blocks,
            "local_tokens": own.num_local_tokens,
            "decoding": own.num_decoding,
            "decoding_tokens": own.num_decoding_tokens,
        }
    return {
        "credit": link.credit,
        "spent": link.spent,
        "backlog_blocks": link._backlog.num_blocks,
        "backlog_tokens": link._backlog.num_tokens,
        "backlog_prompts": len(link._backlog._prompts),
    }


async def _generate(generate: Any, hit: Callable[[str], None], call: ServerCall) -> None:
    # The request came with the opening; nobody else reads.
    try:
        await generate(await call.read(), call)
    except Draining:
        hit("a router handed an answer over")
        raise
