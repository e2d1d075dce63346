"""One attempt at one request, once it has its workers: reserve, prefill, decode.

Owns what its two workers say of it. What the tokens make is the owner's, and so is what happens if the
attempt fails.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Protocol

from baton.errors import BatonError, Draining, InternalError, KvTransferFailed, PeerLost, Unavailable
from baton.failure import from_failure
from baton.v1 import common_pb2, decode_service_pb2, prefill_service_pb2
from baton.v1.decode_service_pb2 import DecodeServiceSessionRequest
from baton.v1.prefill_service_pb2 import PrefillServiceSessionRequest
from router.assignment import Assignment
from router.config import RouterConfig
from router.decode_link import DecodeLink
from router.events import Event, Inbox, LinkLost
from router.outlook import Outlook
from router.prefill_link import PrefillLink
from router.suspicion import Suspicion
from router.timeline import Timeline


class GaveWay(Exception):
    """The attempt has left its decode worker, without its blocks, to be resumed; nobody is at fault.

    is_outgrown: the answer has become too long for the scale step that its KV was computed at; otherwise
        its blocks went to older requests.
    """

    def __init__(self, *, is_outgrown: bool) -> None:
        super().__init__()
        self.is_outgrown = is_outgrown

    @property
    def outcome(self) -> str:
        """What an attempt that ended so is called."""
        return "OUTGROWN" if self.is_outgrown else "PREEMPTED"

    @property
    def reason(self) -> str:
        """What happened, in words."""
        if self.is_outgrown:
            return "its length needs the next scale of the model's positions"
        return "its blocks went to older requests"


class Owner(Protocol):
    """Whose attempt it is; router/generation.py."""

    @property
    def finish_reason(self) -> common_pb2.FinishReason.ValueType:
        """Why the answer is complete, if it is."""

    def sequence(self) -> common_pb2.Sequence:
        """The request as workers get it now."""

    def stamp(self, sequence: common_pb2.Sequence) -> None:
        """Brings what depends on the time up to date."""

    def deliver(self, event: common_pb2.TokenEvent) -> None:
        """Takes the tokens of an event that are new."""

    def deliver_scores(self, event: common_pb2.PromptLogprobs) -> None:
        """Takes log-probabilities of the prompt."""

    def committed_at(self, decode: DecodeLink) -> None:
        """The attempt's KV is at that worker."""


class Attempt:
    """Drives one attempt to its end.

    owner: gets the tokens.
    assignment: its workers.  inbox: where they are heard; attached to both here, detached by the caller.
    """

    def __init__(
        self,
        owner: Owner,
        assignment: Assignment,
        inbox: Inbox,
        *,
        config: RouterConfig,
        timeline: Timeline,
        outlook: Outlook,
        suspicion: Suspicion,
    ) -> None:
        self._owner = owner
        self._assignment = assignment
        self._inbox = inbox
        self._config = config
        self._timeline = timeline
        self._outlook = outlook
        self._suspicion = suspicion
        # How far it is: the prefill worker is done with it; the decode worker has committed the lease, as the
        # KV is there, or as it computes the prompt itself.
        self._prefill_done = assignment.prefill is None
        self._committed = False
        self._handed_over: Draining | None = None
        self._gave_way: GaveWay | None = None

    async def run(self) -> None:
        """Runs to the last token; raises what ends the attempt before, GaveWay and Draining among it."""
        # Made once for both workers: a long one takes its time.
        sequence = self._owner.sequence()
        lease = await self._reserve(sequence)
        if self._assignment.prefill is not None:
            self._owner.stamp(sequence)
            self._send_prefill(self._assignment.prefill, sequence, lease)
        await self._follow(lease)

    async def _reserve(self, sequence: common_pb2.Sequence) -> decode_service_pb2.Lease:
        assignment, inbox = self._assignment, self._inbox
        try:
            assignment.decode.attach(inbox)
            command = decode_service_pb2.ReserveCommand(
                attempt_id=inbox.attempt_id,
                sequence=sequence,
                compute_locally=assignment.prefill is None,
            )
            assignment.decode.send(DecodeServiceSessionRequest(reserve=command))
            lease = await self._granted()
        except BaseException:
            # Whatever went wrong, the prefill worker was never told: its credit is ours again.
            assignment.give_back()
            raise
        self._timeline.reserved()
        return lease

    async def _granted(self) -> decode_service_pb2.Lease:
        assignment = self._assignment
        try:
            async with asyncio.timeout(self._config.reserve_timeout_s):
                event = await self._inbox.get()
        except TimeoutError:
            raise Unavailable(f"{assignment.decode.name} did not answer a reservation in time") from None
        match event:
            case decode_service_pb2.ReserveResult():
                if event.HasField("refusal"):
                    raise from_failure(event.refusal.failure)
                return event.lease
            case LinkLost():
                raise event.error
            case _:
                raise InternalError(f"{assignment.decode.name} answered a reservation out of turn")

    def _send_prefill(
        self, prefill: PrefillLink, sequence: common_pb2.Sequence, lease: decode_service_pb2.Lease
    ) -> None:
        assignment, inbox, decode = self._assignment, self._inbox, self._assignment.decode
        target = prefill_service_pb2.TransferTarget(
            lease_id=lease.lease_id,
            worker=decode.name,
            incarnation=decode.info.incarnation,
            num_held_tokens=lease.num_held_tokens,
        )
        command = prefill_service_pb2.PrefillCommand(
            attempt_id=inbox.attempt_id,
            sequence=sequence,
            target=target,
            cost_tokens=assignment.cost,
        )
        prefill.attach(inbox)
        prefill.send(PrefillServiceSessionRequest(prefill=command))

    async def _follow(self, lease: decode_service_pb2.Lease) -> None:
        """Handles events until both legs are done; raises what ends the attempt."""
        while not (self._owner.finish_reason and self._prefill_done):
            self._heard(await self._inbox.get(), lease)
            if self._gave_way is not None:
                await self._prefill_heard_out(lease)
                raise self._gave_way

    async def _prefill_heard_out(self, lease: decode_service_pb2.Lease) -> None:
        """Waits for what the prefill worker has still to say of an attempt that has left its decode worker.

        It has sent the KV and is about to: two sessions, and the other one was faster. What is lost with it
        are its times, and scores of the prompt, which the next attempt might compute at another scale step.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.reserve_timeout_s):
                while not self._prefill_done:
                    self._heard(await self._inbox.get(), lease)

    def _heard(self, event: Event, lease: decode_service_pb2.Lease) -> None:
        owner = self._owner
        match event:
            case common_pb2.TokenEvent():
                owner.deliver(event)
            case common_pb2.PromptLogprobs():
                owner.deliver_scores(event)
            case common_pb2.AloneStep():
                self._suspicion.runs_alone = not event.ended
            case decode_service_pb2.PromptComputed():
                self._timeline.prompt_computed(event)
                self._kv_is_there()
            case prefill_service_pb2.PrefillEnded():
                self._prefill_done = True
                self._prefill_ended(event, lease)
                if event.HasField("failure") and not self._committed:
                    self._prefill_failed(from_failure(event.failure))
            case LinkLost(role=common_pb2.ROLE_PREFILL):
                self._prefill_lost(event)
            case _ if not owner.finish_reason:
                self._decode_said(event)

    def _prefill_ended(
        self, event: prefill_service_pb2.PrefillEnded, lease: decode_service_pb2.Lease
    ) -> None:
        assignment = self._assignment
        self._timeline.prefill_ended(event)
        if assignment.prefill is not None:
            self._outlook.computed(assignment.prefill, event.prefill)
            num_sent = event.prefill.num_computed_tokens + event.prefill.num_cached_tokens
            if event.HasField("committed"):
                self._outlook.transferred(
                    assignment.prefill.incarnation,
                    assignment.decode.incarnation,
                    num_sent - lease.num_held_tokens,
                    event.transfer_tail_ms,
                )

    def _prefill_lost(self, lost: LinkLost) -> None:
        prefill, is_complete = self._assignment.prefill, bool(self._owner.finish_reason)
        if prefill is not None and not self._prefill_done and not is_complete:
            self._suspicion.lost(prefill.incarnation)
        self._prefill_done = True
        if not self._committed and not is_complete:
            self._prefill_failed(lost.error)

    def _decode_said(self, event: Event) -> None:
        """What the decode worker says beside tokens; not asked once the answer is complete."""
        decode = self._assignment.decode
        match event:
            case decode_service_pb2.LeaseOutcome():
                if not event.HasField("committed"):
                    reason = common_pb2.GoneReason.Name(event.gone).removeprefix("GONE_REASON_")
                    lost = KvTransferFailed(f"the lease at {decode.name} is gone: {reason}")
                    raise self._handed_over or lost
                self._committed = True
                if self._assignment.prefill is not None:
                    self._kv_is_there()
            case decode_service_pb2.DecodeFailed():
                raise from_failure(event.failure)
            case decode_service_pb2.Preempted():
                self._gave_way = GaveWay(is_outgrown=event.outgrown)
            case LinkLost():
                if self._committed:
                    self._suspicion.lost(decode.incarnation)
                raise event.error

    def _kv_is_there(self) -> None:
        self._timeline.committed()
        self._owner.committed_at(self._assignment.decode)

    def _prefill_failed(self, error: BatonError) -> None:
        """Before the commit is known of, only the decode worker can tell whether it happened."""
        if not isinstance(error, Unavailable):
            raise error
        if isinstance(error, Draining):
            self._handed_over = error
        command = decode_service_pb2.AbortIfUncommittedCommand(attempt_id=self._inbox.attempt_id)
        # A link that takes nothing has ended the attempt with its worker's last word, or with LinkLost, or is
        # about to: that is in the inbox or comes there, and says more than that nothing could be sent.
        with suppress(PeerLost):
            self._assignment.decode.send(DecodeServiceSessionRequest(abort_if_uncommitted=command))
