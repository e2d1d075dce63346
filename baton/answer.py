"""What a client gets back: plain values, no protobuf."""

from __future__ import annotations

from dataclasses import dataclass

from baton.v1 import common_pb2, inference_service_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some tokens of an answer.

    start_index: index of the first of them in the answer.
    text: what they complete; "" while a character is incomplete.
    logprobs: natural-log probabilities of the tokens; empty unless asked for.
    """

    start_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]

    @classmethod
    def from_proto(cls, proto: inference_service_pb2.Chunk) -> Chunk:
        """Reads the wire form."""
        return cls(
            start_index=proto.start_index,
            token_ids=tuple(proto.token_ids),
            text=proto.text,
            logprobs=tuple(proto.logprobs),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where a request spent its time, in milliseconds, and who did the work.

    transfer_ms: from the first KV frame to the commit.
    transfer_tail_ms: the part of it after the first token, which no computation hides.
    """

    bucket: str
    prefill_worker: str
    decode_worker: str
    queue_ms: float
    reserve_ms: float
    prefill_ms: float
    transfer_ms: float
    transfer_bytes: int
    ttft_ms: float
    itl_ms: float
    total_ms: float
    num_attempts: int
    transfer_tail_ms: float

    @classmethod
    def from_proto(cls, proto: inference_service_pb2.Timings) -> Timings:
        """Reads the wire form."""
        return cls(**{field.name: getattr(proto, field.name) for field in proto.DESCRIPTOR.fields})


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How a generation went.

    finish_reason: "stop" (an end token was sampled) or "length" (max_tokens reached).
    seed: repeat it, with the same prompt and options, for the same answer.
    """

    request_id: str
    model: str
    finish_reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    seed: int
    timings: Timings

    @classmethod
    def from_proto(cls, proto: inference_service_pb2.Summary) -> Summary:
        """Reads the wire form."""
        reason = common_pb2.FinishReason.Name(proto.finish_reason)
        return cls(
            request_id=proto.request_id,
            model=proto.model,
            finish_reason=reason.removeprefix("FINISH_REASON_").lower(),
            num_prompt_tokens=proto.num_prompt_tokens,
            num_output_tokens=proto.num_output_tokens,
            seed=proto.seed,
            timings=Timings.from_proto(proto.timings),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model served; max_model_len counts prompt plus answer, in tokens."""

    name: str
    max_model_len: int
    weights_id: str

    @classmethod
    def from_proto(cls, proto: inference_service_pb2.Model) -> ModelInfo:
        """Reads the wire form."""
        return cls(name=proto.name, max_model_len=proto.max_model_len, weights_id=proto.weights_id)
