"""What a router has learned of its workers and its traffic, and what it expects.

Hears everything that is measured and hands it to the cores that learn: how long things take, what workers
have cached, how long answers get, which length buckets carry how much work. It decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from baton.v1 import common_pb2, decode_service_pb2
from router.config import RouterConfig
from router.decision_log import DecisionLog
from router.decode_link import DecodeLink
from router.learning.cost_model import CostModel
from router.learning.learned_edges import LearnedEdges
from router.learning.output_lengths import OutputLengths
from router.link import WorkerLink
from router.metrics import RouterMetrics
from router.placing.affinity import BucketAffinity
from router.placing.prefix_map import PrefixMap
from router.prefill_link import PrefillLink

# A worker that does not exist: its predictions are those of the whole fleet.
ANY_WORKER = 0
# How often buckets may be dealt out to workers anew, and their edges learned.
REVIEW_S = 5.0
# A worker that was not measured for so long counts as a typical one again: whoever was slow once would
# otherwise never be asked again, and so never be found to be fast.
STALE_S = 30.0


class Outlook:
    """Everything learned.

    costs: predicted times.  lengths: of answers.  prefixes: what workers have cached.
    """

    def __init__(self, config: RouterConfig, log: DecisionLog, metrics: RouterMetrics) -> None:
        self.costs = CostModel()
        self.lengths = OutputLengths(config.output_quantile) if config.output_quantile else None
        self.prefixes = PrefixMap()
        self.metrics = metrics
        metrics.watch(self.costs)
        self._log = log
        self._names: dict[int, str] = {}
        self._measured_at: dict[int, float] = {}
        num_buckets = len(config.bucket_edges) + 1
        self._edges = LearnedEdges(num_buckets, config.bucket_edges) if config.learn_buckets else None
        self._affinity = BucketAffinity(num_buckets)
        self._reviewed_at = -REVIEW_S
        self._dealt_to: Sequence[PrefillLink] = ()

    def distance(self, bucket: int, worker: int) -> int:
        """From a prefill worker to the nearest one that owns the bucket, in buckets."""
        return self._affinity.distance(bucket, worker)

    def expected_tokens(self, num_prompt_tokens: int, num_output_tokens: int, max_tokens: int) -> int:
        """Tokens that a request is expected to have in a cache at its end."""
        if self.lengths is None:
            return num_prompt_tokens + num_output_tokens
        # The last token's KV is never stored.
        return num_prompt_tokens + self.lengths.expected(max_tokens, num_output_tokens) - 1

    def queued(self, bucket: int, num_tokens: int, work_ms: float) -> None:
        """A prompt of that many uncached tokens, and of that predicted work, has come."""
        self._affinity.observe(bucket, work_ms, _now())
        if self._edges is not None:
            self._edges.observe(num_tokens, work_ms)

    def review(
        self, prefills: Sequence[PrefillLink], decodes: Sequence[DecodeLink]
    ) -> tuple[int, ...] | None:
        """Deals buckets out to the prefill workers there are; returns edges, where they are learned."""
        now = _now()
        is_due = now - self._reviewed_at >= REVIEW_S
        if is_due or prefills is not self._dealt_to:
            # The fleet makes a new list when workers come or go.
            self._dealt_to = prefills
            self._affinity.assign([link.incarnation for link in prefills], now)
        if not is_due:
            return None
        self._reviewed_at = now
        self._forget_idle([*prefills, *decodes], now)
        return None if self._edges is None else self._edges.edges()

    def _forget_idle(self, links: Sequence[WorkerLink[Any, Any]], now: float) -> None:
        """Those that were not measured for long, though not because they are at it."""
        for link in links:
            if not link.num_attempts and now - self._measured_at.get(link.incarnation, now) > STALE_S:
                self._unlearn(link.incarnation)

    def cached(self, link: WorkerLink[Any, Any], changes: common_pb2.CacheChanges) -> None:
        """A worker's prefix cache has changed; raises PeerLost if it cannot have."""
        self.prefixes.apply(link.incarnation, changes, block_size=link.block_size, max_keys=link.num_blocks)

    def stepped(self, link: WorkerLink[Any, Any], load: decode_service_pb2.StepLoad) -> None:
        """A decode worker has computed a step."""
        self._measured_at[link.incarnation] = _now()
        self.costs.observe_step(
            link.incarnation,
            load.num_decoding,
            load.num_context_tokens,
            load.num_prompt_tokens,
            load.duration_ms,
        )

    def joined(self, link: WorkerLink[Any, Any]) -> None:
        """A session with a worker has begun."""
        self._names[link.incarnation] = link.name
        self._log.worker_joined(
            _now(),
            name=link.name,
            role=link.role,
            incarnation=link.incarnation,
            num_blocks=link.num_blocks,
            block_size=link.block_size,
            chunk_tokens=link.chunk_tokens,
            max_batch_tokens=link.max_batch_tokens,
            mixed_tokens=link.mixed_tokens if isinstance(link, DecodeLink) else 0,
            max_running=link.max_running if isinstance(link, DecodeLink) else 0,
        )

    def lost(self, link: WorkerLink[Any, Any]) -> None:
        """A session has ended: what was known of that worker's cache is void."""
        self.prefixes.forget(link.incarnation)
        if link.was_ready:
            self._log.worker_gone(_now(), name=link.name)

    def forgotten(self, incarnation: int) -> None:
        """That process will not come back."""
        self._names.pop(incarnation, None)
        self._unlearn(incarnation)

    def _unlearn(self, incarnation: int) -> None:
        self._measured_at.pop(incarnation, None)
        self.costs.forget(incarnation)

    def close(self) -> None:
        """Writes what is left of the log."""
        self._log.costs(_now(), self.costs, self._names, is_last=True)
        self._log.close()

    def computed(self, link: WorkerLink[Any, Any], times: common_pb2.PrefillTimes) -> None:
        """A worker has computed a prompt."""
        is_prefill = not isinstance(link, DecodeLink)
        # A decode worker's steps say what its prompts cost; see CostModel.step_ms.
        if is_prefill and times.total_ms and times.num_computed_tokens:
            self._measured_at[link.incarnation] = _now()
            self.costs.observe_prefill(
                link.incarnation, times.num_computed_tokens, times.num_cached_tokens, times.compute_ms
            )

    def transferred(self, source: int, target: int, num_tokens: int, tail_ms: float) -> None:
        """The KV of that many tokens has travelled."""
        self.costs.observe_transfer(source, target, num_tokens, tail_ms)

    def answered(self, max_tokens: int, num_output_tokens: int) -> None:
        """A request has ended by itself."""
        self._log.costs(_now(), self.costs, self._names)
        if self.lengths is not None:
            self.lengths.observe(max_tokens, num_output_tokens)


def _now() -> float:
    return asyncio.get_running_loop().time()
