"""Bugs of a router's queue, its placement, what it counts, and what it says of it."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from baton.errors import PeerLost
from router.attempt import Attempt
from router.decode_link import DecodeLink
from router.dispatcher import Dispatcher
from router.explanations import Explanations
from router.link import WorkerLink
from router.placing.decode_load import DecodeLoad
from router.placing.prefill_backlog import PrefillBacklog
from router.placing.prefix_map import PrefixMap
from router.prefill_link import PrefillLink
from router.queueing.buckets import BucketQueue
from router.timeline import Timeline
from tests.mutants.mutant import Mutant, registering

MUTANTS: list[Mutant] = []
mutant = registering(MUTANTS)


@mutant(
    "a decode worker gets fewer and fewer requests: blocks are kept free for answers that have ended", seed=1
)
def growth_never_given_back() -> Any:
    ended = DecodeLoad.ended

    def keep(self: Any, attempt_id: bytes) -> None:
        held = self._held.get(attempt_id)
        if held is not None:
            held.growth = 0
        ended(self, attempt_id)

    return patch.object(DecodeLoad, "ended", keep)


@mutant("a prompt that a decode worker has computed is waited for by others for ever")
def local_prompt_never_over() -> Any:
    ended = DecodeLoad.ended

    def keep(self: Any, attempt_id: bytes) -> None:
        held = self._held.get(attempt_id)
        if held is not None:
            held.num_local_tokens = 0
        ended(self, attempt_id)

    return patch.object(DecodeLoad, "ended", keep)


@mutant("a prefill worker gets fewer and fewer prompts: those that are gone still hold blocks")
def backlog_blocks_never_released() -> Any:
    def keep(self: Any, attempt_id: bytes) -> None:
        self.computed(attempt_id, 0.0)

    return patch.object(PrefillBacklog, "ended", keep)


@mutant("prompts go to a worker for a cache that died with its last process")
def prefixes_of_a_lost_worker_kept() -> Any:
    return patch.object(PrefixMap, "forget", lambda self, worker: None)


@mutant("prompts go to a worker for KV that it evicted", seed=1)
def evicted_prefixes_kept() -> Any:
    return patch.object(PrefixMap, "_remove", lambda self, holder, keys: None)


@mutant("a request waits for KV that nobody sends: its decode worker was not told to compute it")
def nobody_computes_the_prompt() -> Any:
    send = WorkerLink.send

    def forgetful(self: Any, message: Any) -> None:
        if isinstance(self, DecodeLink) and message.WhichOneof("message") == "reserve":
            message.reserve.compute_locally = False
        send(self, message)

    return patch.object(WorkerLink, "send", forgetful)


@mutant("a request of low priority waits for as long as there are others")
def overdue_rule_dropped() -> Any:
    return patch.object(BucketQueue, "_overdue", lambda self, now: None)


@mutant("a client waits for an answer that it said would come too late")
def strict_objective_not_checked() -> Any:
    return patch.object(Dispatcher, "_check_objective", lambda self, ticket: None)


@mutant("a client that lost its place in the queue never hears of it", seed=12)
def displaced_request_not_told() -> Any:
    return patch.object(Dispatcher, "shed", lambda self, item: None)


@mutant("a router's memory fills with the ways of requests that have ended")
def explanations_never_end() -> Any:
    return patch.object(Explanations, "end", lambda self, request_id, answers: None)


@mutant("an answer is explained by an attempt that has failed")
def failed_attempt_called_good() -> Any:
    ended = Timeline.attempt_ended

    def as_last_time(self: Any, outcome: str, reason: str = "") -> None:
        ended(self, self.explain.attempts[0].outcome or outcome, reason)

    return patch.object(Timeline, "attempt_ended", as_last_time)


@mutant("a router sends a prefill worker more than that takes")
def credit_given_back_twice() -> Any:
    give_back = PrefillLink.give_back

    def twice(self: Any, attempt_id: bytes) -> None:
        cost = self._costs.get(attempt_id, 0)
        give_back(self, attempt_id)
        self.credit += cost

    return patch.object(PrefillLink, "give_back", twice)


@mutant(
    "a client is told that its request fits nowhere: a worker that was just lost is still counted on", seed=12
)
def loss_noticed_too_late() -> Any:
    def send(self: Any, message: Any) -> None:
        if self._session is None:
            raise PeerLost(f"{self.name} is not connected")
        try:
            self._session.send(message)
        except PeerLost:
            self.state = "lost"
            raise

    return patch.object(WorkerLink, "send", send)


@mutant("a prompt that is computed where it decodes takes the credit of a prefill worker with it")
def local_attempt_takes_credit() -> Any:
    run = Attempt.run

    async def with_credit(self: Any) -> None:
        link = next((link for link in self._suspicion._fleet.prefill_links() if link.credit), None)
        if self._assignment.prefill is None and link is not None:
            link.credit -= 1
        await run(self)

    return patch.object(Attempt, "run", with_credit)
