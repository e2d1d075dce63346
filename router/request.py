"""A client's request, validated: the only form the rest of the router sees."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import InvalidRequest, UnknownModel
from baton.limits import Limits
from baton.sampling import SamplingParams
from baton.v1 import common_pb2, inference_service_pb2
from router.text import Text

MAX_REQUEST_ID_CHARS = 128
ROLES = frozenset({"system", "user", "assistant"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A validated request.

    prompt_token_ids: the prompt.
    output_token_ids: tokens of the answer that the client has already.
    finish_reason: why those complete the answer, if they do.
    params: sampling parameters, all resolved.
    deadline_at: loop time by which it must end, in seconds, or None.
    arrived_at: loop time of its arrival, in seconds.
    traceparent: W3C header of the caller's span, or "".
    """

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    params: SamplingParams
    deadline_at: float | None
    arrived_at: float
    traceparent: str = ""
    finish_reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_UNSPECIFIED

    def sequence(
        self, output_token_ids: list[int], remaining_ms: int, traceparent: str
    ) -> common_pb2.Sequence:
        """The request as workers see it, with the tokens generated so far."""
        return common_pb2.Sequence(
            request_id=self.request_id,
            token_ids=[*self.prompt_token_ids, *output_token_ids],
            num_prompt_tokens=len(self.prompt_token_ids),
            sampling=self.params.to_proto(),
            traceparent=traceparent,
            remaining_ms=remaining_ms,
        )


class RequestReader:
    """Turns GenerateRequest messages into validated requests.

    model: name of the model served.
    text: its tokenizer and chat template.
    limits: what it can take.
    eos_token_ids: its own end-of-sequence ids.
    default_max_tokens: for requests that name none.
    rng: source of seeds and request ids.
    """

    def __init__(
        self,
        *,
        model: str,
        text: Text,
        limits: Limits,
        eos_token_ids: tuple[int, ...],
        default_max_tokens: int,
        rng: random.Random,
    ) -> None:
        self._model = model
        self._text = text
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._default_max_tokens = default_max_tokens
        self._rng = rng

    async def read(
        self,
        proto: inference_service_pb2.GenerateRequest,
        *,
        arrived_at: float,
        deadline_at: float | None,
        traceparent: str,
    ) -> GenerationRequest:
        """The validated request; raises InvalidRequest or UnknownModel, naming the field."""
        if proto.model not in ("", self._model):
            raise UnknownModel(
                f"model {proto.model!r} is not served here; this cluster serves {self._model!r}",
                field="model",
            )
        if len(proto.request_id) > MAX_REQUEST_ID_CHARS or not proto.request_id.isprintable():
            raise InvalidRequest(
                f"request_id must be at most {MAX_REQUEST_ID_CHARS} printable characters", field="request_id"
            )
        prompt_token_ids = await self._prompt(proto)
        params = self._params(proto, len(prompt_token_ids))
        self._limits.check(prompt_token_ids, params.max_tokens)
        self._check_resume(proto, params)
        self._check_stop_ids(params)
        return GenerationRequest(
            request_id=proto.request_id or f"req-{self._rng.getrandbits(64):016x}",
            prompt_token_ids=prompt_token_ids,
            output_token_ids=list(proto.output_token_ids),
            params=params,
            deadline_at=deadline_at,
            arrived_at=arrived_at,
            traceparent=traceparent,
            finish_reason=self._finish_reason(proto.output_token_ids, params),
        )

    async def _prompt(self, proto: inference_service_pb2.GenerateRequest) -> list[int]:
        given = [name for name in ("text", "chat", "token_ids") if proto.HasField(name)]
        if len(given) != 1:
            raise InvalidRequest(
                f"the request has {' and '.join(given) or 'no prompt'}; set exactly one of text, chat and "
                "token_ids",
                field="prompt",
            )
        if proto.HasField("token_ids"):
            # Before they are copied: there may be millions of them.
            self._limits.check_length(len(proto.token_ids.ids))
            return list(proto.token_ids.ids)
        if proto.HasField("text"):
            return await self._text.encode(proto.text, self._limits.max_model_len)
        messages = [{"role": m.role, "content": m.content} for m in proto.chat.messages]
        unknown = {message["role"] for message in messages} - ROLES
        if unknown:
            raise InvalidRequest(
                f"role {min(unknown)!r} is unknown; allowed: {', '.join(sorted(ROLES))}", field="chat"
            )
        return await self._text.encode_chat(messages, self._limits.max_model_len)

    def _params(self, proto: inference_service_pb2.GenerateRequest, num_prompt_tokens: int) -> SamplingParams:
        room = max(1, self._limits.max_output_tokens(num_prompt_tokens))
        given = {
            name: getattr(proto, name)
            for name in ("temperature", "top_k", "top_p", "min_p")
            if proto.HasField(name)
        }
        return SamplingParams(
            **given,
            seed=proto.seed if proto.HasField("seed") else self._rng.getrandbits(64),
            max_tokens=proto.max_tokens
            if proto.HasField("max_tokens")
            else min(self._default_max_tokens, room),
            stop_token_ids=tuple(proto.stop_token_ids),
            ignore_eos=proto.ignore_eos,
            logprobs=proto.logprobs,
        )

    def _check_resume(self, proto: inference_service_pb2.GenerateRequest, params: SamplingParams) -> None:
        output_token_ids = proto.output_token_ids
        if not output_token_ids:
            return
        if len(output_token_ids) > params.max_tokens or max(output_token_ids) >= self._limits.vocab_size:
            raise InvalidRequest(
                f"output_token_ids has {len(output_token_ids)} tokens; it can have max_tokens "
                f"({params.max_tokens}) at most, all inside the vocabulary of {self._limits.vocab_size}",
                field="output_token_ids",
            )
        if not proto.HasField("seed"):
            raise InvalidRequest("an answer can only go on with the seed it began with", field="seed")

    def _finish_reason(
        self, output_token_ids: Sequence[int], params: SamplingParams
    ) -> common_pb2.FinishReason.ValueType:
        """Why an answer that a client brings along is complete, by the workers' rule; or unspecified."""
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}
        if output_token_ids and output_token_ids[-1] in stops:
            return common_pb2.FINISH_REASON_STOP
        if len(output_token_ids) == params.max_tokens:
            return common_pb2.FINISH_REASON_LENGTH
        return common_pb2.FINISH_REASON_UNSPECIFIED

    def _check_stop_ids(self, params: SamplingParams) -> None:
        if any(token_id >= self._limits.vocab_size for token_id in params.stop_token_ids):
            raise InvalidRequest(
                f"stop_token_ids has ids outside the vocabulary of {self._limits.vocab_size}",
                field="stop_token_ids",
            )
