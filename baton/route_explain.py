"""Why a request went where it did, and where its time went: plain values, no protobuf.

Owns the SDK's form of RouteExplain. How it is drawn is baton/cli/waterfall.py's affair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton.v1 import common_pb2, route_explain_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTimes:
    """How a prompt was computed, as its worker measured it.

    wait_ms: from the command's arrival to the first step that computed a part of it.
    compute_ms: its share of the steps that computed it.
    total_ms: from the command's arrival to the first token.
    """

    wait_ms: float
    compute_ms: float
    total_ms: float
    num_steps: int
    num_computed_tokens: int
    num_cached_tokens: int

    @classmethod
    def from_proto(cls, proto: common_pb2.PrefillTimes) -> PrefillTimes:
        """Reads the wire form."""
        return cls(**_scalars(proto))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A place for an attempt, as predicted when the attempt was placed; times in milliseconds.

    prefill_worker: computes the prompt; the decode worker itself where the two are equal.
    num_cached_tokens: leading tokens that the one that computes has cached.
    num_held_tokens: leading tokens that the decode worker holds, which do not travel.
    wait_ms: until the computation begins.
    transfer_ms: the part of the transfer that nothing hides.
    itl_ms: gap between tokens at the decode worker with this request.
    score_ms: what decided; the smallest is taken.
    excluded: why it could not be taken; "" if it could.
    """

    prefill_worker: str
    decode_worker: str
    num_cached_tokens: int
    num_held_tokens: int
    wait_ms: float
    prefill_ms: float
    transfer_ms: float
    itl_ms: float
    score_ms: float
    chosen: bool
    excluded: str

    @property
    def is_local(self) -> bool:
        """Whether the decode worker computes the prompt itself."""
        return self.prefill_worker == self.decode_worker

    @classmethod
    def from_proto(cls, proto: route_explain_pb2.Candidate) -> Candidate:
        """Reads the wire form."""
        return cls(**_scalars(proto))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptExplain:
    """One attempt. Moments are milliseconds since the request reached its router; None has not come.

    first_token_at_ms: its first token reached the router.
    committed_at_ms: the router heard that the decode worker has the KV.
    decoding_at_ms: the first token that the decode worker sampled itself reached the router.
    transfer_ms: from the first KV frame to the commit.
    transfer_tail_ms: the part of that after the first token, which no computation hides.
    transfer_hidden_share: share of transfer_bytes that was sent when the first token was sampled, 0 to 1.
    outcome: "OK", "CANCELLED", "PREEMPTED", "OUTGROWN" or an error's code; "" while it runs.
    reason: what happened, in words; "" if it ended well.
    candidates: the places looked at, the best first; of many the best ones.
    num_candidates: how many places there were.
    """

    number: int
    queued_at_ms: float
    placed_at_ms: float | None
    reserved_at_ms: float | None
    first_token_at_ms: float | None
    committed_at_ms: float | None
    decoding_at_ms: float | None
    ended_at_ms: float | None
    prefill: PrefillTimes | None
    transfer_ms: float
    transfer_tail_ms: float
    transfer_bytes: int
    transfer_hidden_share: float
    outcome: str
    reason: str
    candidates: tuple[Candidate, ...]
    num_candidates: int

    @property
    def place(self) -> Candidate | None:
        """The candidate that was taken; None before."""
        return next((candidate for candidate in self.candidates if candidate.chosen), None)

    @classmethod
    def from_proto(cls, proto: route_explain_pb2.AttemptExplain) -> AttemptExplain:
        """Reads the wire form."""
        return cls(
            **_scalars(proto),
            prefill=PrefillTimes.from_proto(proto.prefill) if proto.HasField("prefill") else None,
            candidates=tuple(Candidate.from_proto(candidate) for candidate in proto.candidates),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteExplain:
    """One answer's way through the cluster. Moments as in AttemptExplain.

    tenant: whose request it is; "" where nobody is told apart.
    priority: "low", "normal" or "high".
    bucket: label of the length bucket.
    num_uncached_tokens: tokens that no prefill worker had cached when it was queued: what the bucket goes by.
    expected_output_tokens: tokens that the answer was expected to have.
    ttft_objective_ms: longest wait for the first token asked for, or that follows from the prompt's length.
    outcome: "OK", "CANCELLED" or the code of the error that ended it; "" while it runs.
    attempts: what was tried, oldest first; of very many the last ones.
    regret_ms: max(0, measured TTFT - predicted TTFT of the best place not taken).
    reported_at_ms: when this was said.
    """

    request_id: str
    sample_index: int
    router: str
    tenant: str
    priority: str
    bucket: str
    num_prompt_tokens: int
    num_uncached_tokens: int
    expected_output_tokens: int
    ttft_objective_ms: float
    first_token_at_ms: float | None
    ended_at_ms: float | None
    outcome: str
    attempts: tuple[AttemptExplain, ...]
    regret_ms: float
    reported_at_ms: float

    @classmethod
    def from_proto(cls, proto: route_explain_pb2.RouteExplain) -> RouteExplain:
        """Reads the wire form."""
        attempts = tuple(AttemptExplain.from_proto(attempt) for attempt in proto.attempts)
        return cls(**_scalars(proto) | {"priority": _priority(proto.priority), "attempts": attempts})


def _priority(proto: common_pb2.Priority.ValueType) -> str:
    name = common_pb2.Priority.Name(proto or common_pb2.PRIORITY_NORMAL)
    return name.removeprefix("PRIORITY_").lower()


def _scalars(message: Any) -> dict[str, Any]:
    """The fields of a message that are no messages themselves; None for an optional one that is absent."""
    return {
        field.name: getattr(message, field.name)
        if not field.has_presence or message.HasField(field.name)
        else None
        for field in message.DESCRIPTOR.fields
        if field.message_type is None
    }
