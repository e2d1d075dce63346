"""The inside of one router, put together: what a door in front of it needs."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Self

from baton.identity import Identity
from baton.ports import Registry
from router.assignment import Ticket
from router.config import RouterConfig
from router.decision_log import DecisionLog
from router.decode_link import DecodeDialer, DecodeLink
from router.dispatcher import Dispatcher
from router.explanations import Explanations
from router.fleet import Fleet
from router.metrics import RouterMetrics
from router.outlook import Outlook
from router.placing.placement import Placement
from router.prefill_link import PrefillDialer, PrefillLink
from router.queueing.buckets import BucketQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterCore:
    """Queue, dispatcher and workers of one router, and what it has learned of them."""

    config: RouterConfig
    queue: BucketQueue[Ticket]
    dispatcher: Dispatcher
    fleet: Fleet
    outlook: Outlook
    explanations: Explanations
    log: DecisionLog

    @classmethod
    def assemble(
        cls,
        config: RouterConfig,
        *,
        identity: Identity,
        registry: Registry,
        prefill_dialer: PrefillDialer,
        decode_dialer: DecodeDialer,
        rng: random.Random,
        metrics: RouterMetrics | None = None,
    ) -> Self:
        """Puts it together; fleet.run() then follows the registry. Raises ConfigError for the log's file."""
        log = DecisionLog(config.decision_log, config=config, now=asyncio.get_running_loop().time())
        outlook = Outlook(config, log, metrics or RouterMetrics())
        placement: Placement[PrefillLink, DecodeLink] = Placement(
            outlook.costs,
            rng=rng,
            mode=config.placement,
            itl_objective_ms=config.itl_objective_ms,
            local_max_tokens=config.local_max_tokens,
            distance=outlook.distance,
        )
        queue: BucketQueue[Ticket] = BucketQueue(
            config.bucket_edges,
            max_items=config.max_queue,
            max_wait_s=config.max_wait_s,
            # Made below, with this queue.
            on_shed=lambda item: dispatcher.shed(item),  # noqa: PLW0108
        )
        dispatcher = Dispatcher(queue, placement, outlook, grace_s=config.resume_wait_s)
        fleet = Fleet(
            registry=registry,
            identity=identity,
            prefill_dialer=prefill_dialer,
            decode_dialer=decode_dialer,
            rng=rng,
            needs_prefill=config.placement == "disaggregated",
            observer=outlook,
            on_change=dispatcher.kick,
        )
        dispatcher.attach(fleet)
        return cls(
            config=config,
            queue=queue,
            dispatcher=dispatcher,
            fleet=fleet,
            outlook=outlook,
            explanations=Explanations(),
            log=log,
        )

    def close(self) -> None:
        """Cancels timers and writes what is left of the log."""
        self.dispatcher.close()
        self.outlook.close()
