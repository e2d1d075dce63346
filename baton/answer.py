"""What a client gets back: plain values, no protobuf."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton.route_explain import RouteExplain
from baton.v1 import common_pb2, inference_service_pb2

# The likeliest tokens at one position, likeliest first: (token id, natural-log probability).
TopLogprobs = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some tokens of an answer.

    index: which of the n answers.
    start_index: index of the first of the tokens in the answer.
    text: what they complete; "" while a character is incomplete, or while it could still become a stop.
    logprobs: natural-log probabilities of the tokens; empty unless asked for.
    top_logprobs: the likeliest tokens beside each of them; empty unless asked for.
    finish_reason: why the answer ended, in its last chunk, which may have no tokens; "" before.
    """

    index: int
    start_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...]
    finish_reason: str

    @classmethod
    def from_proto(cls, proto: inference_service_pb2.Chunk) -> Chunk:
        """Reads the wire form."""
        return cls(
            index=proto.index,
            start_index=proto.start_index,
            token_ids=tuple(proto.token_ids),
            text=proto.text,
            logprobs=tuple(proto.logprobs),
            top_logprobs=_top_logprobs(proto.top_logprobs),
            finish_reason=_reason(proto.finish_reason),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptToken:
    """One token of the prompt.

    logprob: its natural-log probability after the tokens before it.
    top_logprobs: the likeliest tokens at its position; empty unless asked for.
    """

    token_id: int
    logprob: float
    top_logprobs: TopLogprobs

    @classmethod
    def from_proto(cls, proto: inference_service_pb2.PromptLogprobsChunk) -> list[PromptToken]:
        """Reads the wire form of consecutive tokens."""
        tops = _top_logprobs(proto.top_logprobs) or ((),) * len(proto.token_ids)
        return [
            cls(token_id=token_id, logprob=logprob, top_logprobs=top)
            for token_id, logprob, top in zip(proto.token_ids, proto.logprobs, tops, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One whole answer; the fields as in Chunk.

    matched_stop: the stop text that ended it, or "".
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...]
    finish_reason: str
    matched_stop: str

    @classmethod
    def join(cls, choice: Choice, chunks: Iterable[Chunk]) -> Answer:
        """The answer of one index, from the chunks of all."""
        own = [chunk for chunk in chunks if chunk.index == choice.index]
        return cls(
            index=choice.index,
            text="".join(chunk.text for chunk in own),
            token_ids=tuple(token_id for chunk in own for token_id in chunk.token_ids),
            logprobs=tuple(logprob for chunk in own for logprob in chunk.logprobs),
            top_logprobs=tuple(top for chunk in own for top in chunk.top_logprobs),
            finish_reason=choice.finish_reason,
            matched_stop=choice.matched_stop,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTimes:
    """Where the time of a KV transfer went, in milliseconds.

    The parts overlap: their sum may exceed the whole.

    open_ms: until the decode worker had admitted the write.
    wait_ms: waiting for room at the decode worker.
    prepare_ms: reading the cache and computing digests, at the prefill worker.
    wire_ms: handing frames to the transport.
    verify_ms: verifying frames, at the decode worker.
    convert_ms: converting and storing them, at the decode worker.
    commit_ms: from the commit to its answer.
    """

    open_ms: float
    wait_ms: float
    prepare_ms: float
    wire_ms: float
    verify_ms: float
    convert_ms: float
    commit_ms: float

    @classmethod
    def from_proto(cls, proto: common_pb2.TransferTimes) -> TransferTimes:
        """Reads the wire form."""
        return cls(**{field.name: getattr(proto, field.name) for field in proto.DESCRIPTOR.fields})


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where a request spent its time, in milliseconds, and who did the work.

    Of several attempts, queue_ms, reserve_ms, prefill_ms and prefill_worker are those of the one that gave
    the first token, the transfer and decode_worker those of the last.

    transfer_ms: from the first KV frame to the commit.
    transfer_tail_ms: the part of it after the first token, which no computation hides.
    transfer_hidden_share: of the KV bytes, those that the decode worker had when the last layer was
        computed, 0 to 1.
    num_preemptions: how often a decode worker gave its blocks to older requests.
    num_outgrown: how often it outgrew a scale of the model's positions, so that all its tokens were computed
        again.
    num_handovers: how often a worker that was about to leave handed it over to another one.
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
    num_preemptions: int
    transfer_times: TransferTimes
    transfer_hidden_share: float
    num_handovers: int
    num_outgrown: int

    @classmethod
    def from_proto(cls, proto: inference_service_pb2.Timings) -> Timings:
        """Reads the wire form."""
        fields = {field.name: getattr(proto, field.name) for field in proto.DESCRIPTOR.fields}
        return cls(**fields | {"transfer_times": TransferTimes.from_proto(proto.transfer_times)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How one of the n answers ended.

    finish_reason: "stop" (an end token was sampled, or a stop text came up) or "length" (max_tokens reached).
    num_output_tokens: up to and including the token that completed a stop text.
    matched_stop: that stop text, or "".
    """

    index: int
    finish_reason: str
    num_output_tokens: int
    matched_stop: str

    @classmethod
    def from_proto(cls, proto: inference_service_pb2.Choice) -> Choice:
        """Reads the wire form."""
        return cls(
            index=proto.index,
            finish_reason=_reason(proto.finish_reason),
            num_output_tokens=proto.num_output_tokens,
            matched_stop=proto.matched_stop,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How a generation went.

    choices: its answers, by index.
    num_prompt_tokens: counted once, for however many answers.
    num_output_tokens: of all answers together.
    num_cached_tokens: tokens of the prompt that did not have to be computed.
    seed: repeat it, with the same prompt and options, for the same answers.
    explain: why the first answer went where it did; `baton explain` draws it, for the others too.
    """

    request_id: str
    model: str
    choices: tuple[Choice, ...]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    seed: int
    timings: Timings
    explain: RouteExplain

    @property
    def finish_reason(self) -> str:
        """Why the first answer ended."""
        return self.choices[0].finish_reason

    @classmethod
    def from_proto(cls, proto: inference_service_pb2.Summary) -> Summary:
        """Reads the wire form."""
        return cls(
            request_id=proto.request_id,
            model=proto.model,
            choices=tuple(Choice.from_proto(choice) for choice in proto.choices),
            num_prompt_tokens=proto.num_prompt_tokens,
            num_output_tokens=proto.num_output_tokens,
            num_cached_tokens=proto.num_cached_tokens,
            seed=proto.seed,
            timings=Timings.from_proto(proto.timings),
            explain=RouteExplain.from_proto(proto.explain),
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


def _reason(proto: common_pb2.FinishReason.ValueType) -> str:
    if not proto:
        return ""
    return common_pb2.FinishReason.Name(proto).removeprefix("FINISH_REASON_").lower()


def _top_logprobs(protos: Iterable[common_pb2.TopLogprobs]) -> tuple[TopLogprobs, ...]:
    return tuple(tuple(zip(proto.token_ids, proto.logprobs, strict=True)) for proto in protos)
