"""A client's request, validated: the only form the rest of the router sees."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from baton.errors import InvalidRequest, UnknownModel
from baton.limits import Limits
from baton.prefix_keys import request_salt, tenant_salt
from baton.sampling import Grammar, SamplingParams
from baton.v1 import common_pb2
from baton.v1.inference_service_pb2 import GenerateRequest, PartialAnswer
from router.answer_text import TextOptions
from router.config import RouterConfig
from router.grammars import GrammarCheck
from router.stops import StopAutomaton
from router.tenancy.tenants import Tenant
from router.text import Text

MAX_REQUEST_ID_CHARS = 128
MAX_CACHE_SALT_CHARS = 256
MAX_ANSWERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A validated request for one of the answers to a prompt.

    prompt_token_ids: the prompt.
    output_token_ids: tokens of the answer that the client has already.
    finish_reason: why those complete the answer, if they do.
    params: sampling parameters, all resolved.
    deadline_at: loop time by which it must end, in seconds, or None.
    arrived_at: loop time of its arrival, in seconds.
    traceparent: W3C header of the caller's span, or "".
    sample_index: which of the answers this is; part of the key of the random numbers.
    cache_salt: key of the prefix keys: the tenant's own, and the request's where it brings one.
    tenant: name of whose it is; "" where nobody is told apart.
    weight: the tenant's share in fair queueing.
    priority: who goes first; never unspecified.
    ttft_objective_ms: longest wait for the first token that the client names, or None.
    num_delivered_chars: length of the text that the client has of it, in code points.
    """

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    params: SamplingParams
    deadline_at: float | None
    arrived_at: float
    traceparent: str = ""
    finish_reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_UNSPECIFIED
    sample_index: int = 0
    cache_salt: bytes = b""
    tenant: str = ""
    weight: float = 1.0
    priority: common_pb2.Priority.ValueType = common_pb2.PRIORITY_NORMAL
    ttft_objective_ms: float | None = None
    num_delivered_chars: int = 0

    def objective_ms(self, config: RouterConfig) -> float:
        """Longest wait for the first token: the client's own, or the one for a prompt of that length."""
        if self.ttft_objective_ms is not None:
            return self.ttft_objective_ms
        return config.ttft_base_ms + config.ttft_per_token_ms * len(self.prompt_token_ids)

    def sequence(self, output_token_ids: list[int], *, now: float, traceparent: str) -> common_pb2.Sequence:
        """The request as workers see it at loop time `now`, with the tokens generated so far."""
        sequence = common_pb2.Sequence(
            request_id=self.request_id,
            token_ids=[*self.prompt_token_ids, *output_token_ids],
            num_prompt_tokens=len(self.prompt_token_ids),
            sampling=self.params.to_proto(),
            traceparent=traceparent,
            sample_index=self.sample_index,
            cache_salt=self.cache_salt,
        )
        self.stamp(sequence, now)
        return sequence

    def stamp(self, sequence: common_pb2.Sequence, now: float) -> None:
        """Brings what depends on the time up to date."""
        if self.deadline_at is not None:
            # 0 would mean that there is none.
            sequence.remaining_ms = max(1, round(1000 * (self.deadline_at - now)))
        sequence.age_ms = max(0, round(1000 * (now - self.arrived_at)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest:
    """A client's whole request: the answers it wants to one prompt, and their text.

    answers: one request per answer, by index.
    text: what it says about their text.
    """

    answers: tuple[GenerationRequest, ...]
    text: TextOptions = field(default_factory=TextOptions)

    @property
    def first(self) -> GenerationRequest:
        """The first answer's; what is the same for all of them is read here."""
        return self.answers[0]


class RequestReader:
    """Turns GenerateRequest messages into validated requests.

    model: name of the model served.
    text: its tokenizer and chat template.
    limits: what it can take.
    eos_token_ids: its own end-of-sequence ids.
    rng: source of seeds and request ids.
    grammars: checks those of requests.
    """

    def __init__(
        self,
        *,
        model: str,
        text: Text,
        limits: Limits,
        eos_token_ids: tuple[int, ...],
        rng: random.Random,
        grammars: GrammarCheck,
    ) -> None:
        self._model = model
        self._text = text
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._rng = rng
        self._grammars = grammars

    async def read(
        self,
        proto: GenerateRequest,
        *,
        tenant: Tenant,
        arrived_at: float,
        deadline_at: float | None,
        traceparent: str,
        default_max_tokens: int,
    ) -> PromptRequest:
        """The validated request; raises InvalidRequest or UnknownModel, naming the field.

        tenant: whose it is; cached KV is shared inside a tenant only.
        default_max_tokens: if it names none; less where the context ends.
        """
        self._check_names(proto)
        priority, ttft_objective_ms = tenant.priority(proto.priority), _ttft_objective_ms(proto)
        text = _text_options(proto)
        prompt_token_ids = await self._prompt(proto)
        params = self._params(proto, len(prompt_token_ids), default_max_tokens)
        self._limits.check(prompt_token_ids, params.max_tokens)
        params.check_vocab(self._limits.vocab_size)
        first = GenerationRequest(
            request_id=proto.request_id or f"req-{self._rng.getrandbits(64):016x}",
            prompt_token_ids=prompt_token_ids,
            output_token_ids=[],
            params=params,
            deadline_at=deadline_at,
            arrived_at=arrived_at,
            traceparent=traceparent,
            cache_salt=request_salt(tenant_salt(tenant.name), proto.cache_salt),
            tenant=tenant.name,
            weight=tenant.weight,
            priority=priority,
            ttft_objective_ms=ttft_objective_ms,
        )
        return PromptRequest(answers=await self._checked(self._answers(proto, first)), text=text)

    def _check_names(self, proto: GenerateRequest) -> None:
        if proto.model not in ("", self._model):
            raise UnknownModel(
                f"model {proto.model[:64]!r} is not served here; this cluster serves {self._model!r}",
                field="model",
            )
        if len(proto.request_id) > MAX_REQUEST_ID_CHARS or not proto.request_id.isprintable():
            raise InvalidRequest(
                f"request_id must be at most {MAX_REQUEST_ID_CHARS} printable characters", field="request_id"
            )
        if len(proto.cache_salt) > MAX_CACHE_SALT_CHARS:
            raise InvalidRequest(
                f"cache_salt must be at most {MAX_CACHE_SALT_CHARS} characters", field="cache_salt"
            )

    async def _prompt(self, proto: GenerateRequest) -> list[int]:
        given = [name for name in ("text", "chat", "token_ids") if proto.HasField(name)]
        if len(given) != 1:
            raise InvalidRequest(
                f"the request has {' and '.join(given) or 'no prompt'}; set exactly one of text, chat and "
                "token_ids",
                field="prompt",
            )
        keep = self._num_kept(proto)
        if proto.HasField("token_ids"):
            ids = proto.token_ids.ids
            # Before they are copied: there may be millions of them.
            self._limits.check_length(min(len(ids), keep or len(ids)))
            return list(ids[-keep:])
        if proto.HasField("text"):
            return (await self._text.encode(proto.text, self._limits.max_model_len))[-keep:]
        return (await self._text.encode_chat(proto.chat, self._limits.max_model_len))[-keep:]

    def _num_kept(self, proto: GenerateRequest) -> int:
        """How many of the prompt's last tokens to keep; 0 keeps all, as a slice from -0 does."""
        if not proto.HasField("truncate_prompt_tokens"):
            return 0
        keep, most = proto.truncate_prompt_tokens, self._limits.max_model_len - 1
        if not 1 <= keep <= most:
            raise InvalidRequest(
                f"truncate_prompt_tokens is {keep}; it must be between 1 and {most}",
                field="truncate_prompt_tokens",
            )
        return keep

    def _params(self, proto: GenerateRequest, num_prompt_tokens: int, default: int) -> SamplingParams:
        room = max(1, self._limits.max_output_tokens(num_prompt_tokens))
        given = {
            field.name: _PARAMETERS[field.name](value)
            for field, value in proto.ListFields()
            if field.name in _PARAMETERS
        }
        return SamplingParams(
            **given,
            seed=proto.seed if proto.HasField("seed") else self._rng.getrandbits(64),
            max_tokens=proto.max_tokens if proto.HasField("max_tokens") else min(default, room),
        )

    def _answers(self, proto: GenerateRequest, first: GenerationRequest) -> tuple[GenerationRequest, ...]:
        n = proto.n if proto.HasField("n") else 1
        if not 1 <= n <= MAX_ANSWERS:
            raise InvalidRequest(f"n is {n}; it must be between 1 and {MAX_ANSWERS}", field="n")
        known = self._partial_answers(proto, n)
        # The prompt is the same for all, and so are its log-probabilities.
        plain: tuple[GenerationRequest, ...] = (first,)
        if n > 1:
            others = replace(first, params=replace(first.params, prompt_logprobs=None))
            plain += tuple(replace(others, sample_index=index) for index in range(1, n))
        return tuple(self._resumed(answer, known.get(answer.sample_index)) for answer in plain)

    async def _checked(self, answers: tuple[GenerationRequest, ...]) -> tuple[GenerationRequest, ...]:
        """The same answers, with an end for those that are complete by their grammar."""
        grammar = answers[0].params.grammar
        if grammar is None:
            return answers
        completes = await self._grammars.completes(grammar, [answer.output_token_ids for answer in answers])
        stop = common_pb2.FINISH_REASON_STOP
        return tuple(
            replace(answer, finish_reason=stop) if is_complete else answer
            for answer, is_complete in zip(answers, completes, strict=True)
        )

    def _partial_answers(self, proto: GenerateRequest, n: int) -> Mapping[int, PartialAnswer]:
        known = {answer.index: answer for answer in proto.partial_answers}
        if known and not proto.HasField("seed"):
            raise InvalidRequest("an answer can only go on with the seed it began with", field="seed")
        if len(known) != len(proto.partial_answers) or not known.keys() <= set(range(n)):
            raise InvalidRequest(
                f"partial_answers must name each answer once, with an index below n ({n})",
                field="partial_answers",
            )
        return known

    def _resumed(self, request: GenerationRequest, known: PartialAnswer | None) -> GenerationRequest:
        if known is None:
            return request
        most = request.params.max_tokens
        if len(known.token_ids) > most:
            raise InvalidRequest(
                f"partial_answers has {len(known.token_ids)} tokens of an answer; it can have max_tokens "
                f"({most}) at most",
                field="partial_answers",
            )
        if max(known.token_ids, default=0) >= self._limits.vocab_size:
            raise InvalidRequest(
                f"partial_answers has ids outside the vocabulary of {self._limits.vocab_size}",
                field="partial_answers",
            )
        return replace(
            request,
            output_token_ids=list(known.token_ids),
            num_delivered_chars=known.num_chars,
            finish_reason=known.finish_reason or self._finish_reason(known.token_ids, request.params),
        )

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


def _ttft_objective_ms(proto: GenerateRequest) -> float | None:
    if not proto.HasField("ttft_objective_ms"):
        return None
    objective_ms = proto.ttft_objective_ms
    if not 0 < objective_ms < math.inf:
        raise InvalidRequest(
            f"ttft_objective_ms is {objective_ms:g}; it must be a number of milliseconds above 0",
            field="ttft_objective_ms",
        )
    return objective_ms


def _text_options(proto: GenerateRequest) -> TextOptions:
    return TextOptions(
        stops=StopAutomaton(proto.stop) if proto.stop else None,
        include_stop=proto.include_stop_in_text,
        skip_special_tokens=proto.skip_special_tokens if proto.HasField("skip_special_tokens") else True,
        keep_tool_markers=bool(proto.chat.tools),
    )


def _bias(proto: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(proto.items()))


def _grammar(proto: common_pb2.Grammar) -> Grammar:
    grammar = Grammar.from_proto(proto)
    if grammar is None:
        raise InvalidRequest(
            "grammar is empty; set one of json_schema, regex, lark and choices", field="grammar"
        )
    return grammar


# How a field of GenerateRequest, where it is set, becomes the sampling parameter of that name.
_PARAMETERS: Mapping[str, Callable[[Any], Any]] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "logit_bias": _bias,
    "allowed_token_ids": tuple,
    "min_tokens": int,
    "stop_token_ids": tuple,
    "ignore_eos": bool,
    "logprobs": bool,
    "top_logprobs": int,
    "prompt_logprobs": int,
    "grammar": _grammar,
}
