"""Sampling parameters: what they mean, which values are legal, and their wire form.

Edits and filters apply in one order on fp32 logits; docs/sampling.md states it, and
transformers' processors applied in that order give the same. A draw is Gumbel-argmax
over the surviving tokens with Philox4x32-10 numbers keyed by the seed
(engine/philox.py); ties go to the lowest token id. SAMPLER_VERSION changes whenever
any of this does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.errors import InvalidRequest
from baton.v1 import common_pb2

SAMPLER_VERSION = 2
MAX_SEED = 2**64 - 1
MAX_STOP_TOKEN_IDS = 64
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_GRAMMAR_CHARS = 100_000
MAX_CHOICES = 1_000
GRAMMAR_KINDS = ("json_schema", "regex", "lark", "choice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """A language that constrains an answer.

    kind: "json_schema", "regex", "lark" (a context-free grammar in Lark syntax) or "choice".
    source: its text, or a JSON schema as a mapping; for "choice" empty.
    choices: the texts to choose from, for "choice"; kept as a tuple.

    Raises InvalidRequest, naming the field. Whether the source itself is sound is for the
    compiler to say (baton/grammars.py).
    """

    kind: str
    source: str = ""
    choices: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            raise InvalidRequest(
                f"grammar kind {self.kind!r} is unknown; allowed: {', '.join(GRAMMAR_KINDS)}", field="grammar"
            )
        if self.kind == "json_schema" and isinstance(self.source, Mapping):
            object.__setattr__(self, "source", _schema_text(self.source))
        if isinstance(self.choices, list):
            object.__setattr__(self, "choices", tuple(self.choices))
        self._check_types()
        needed, other = ("choices", "source") if self.kind == "choice" else ("source", "choices")
        if not getattr(self, needed) or getattr(self, other):
            raise InvalidRequest(
                f"a grammar of kind {self.kind!r} needs {needed}, and no {other}", field="grammar"
            )
        if len(self.source) + sum(map(len, self.choices)) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                f"the grammar is longer than {MAX_GRAMMAR_CHARS} characters", field="grammar"
            )
        if len(self.choices) > MAX_CHOICES or not all(self.choices):
            raise InvalidRequest(
                f"choices must be 1 to {MAX_CHOICES} texts, none of them empty", field="grammar"
            )

    def _check_types(self) -> None:
        if not isinstance(self.source, str):
            raise InvalidRequest(
                "a grammar's source must be text; only a JSON schema may be a mapping", field="grammar"
            )
        if not isinstance(self.choices, tuple) or not all(isinstance(text, str) for text in self.choices):
            raise InvalidRequest("a grammar's choices must be a sequence of texts", field="grammar")

    def to_proto(self) -> common_pb2.Grammar:
        """The wire form."""
        if self.kind == "choice":
            return common_pb2.Grammar(choices=common_pb2.Choices(texts=self.choices))
        proto = common_pb2.Grammar()
        setattr(proto, self.kind, self.source)
        return proto

    @classmethod
    def from_proto(cls, proto: common_pb2.Grammar) -> Grammar | None:
        """Reads the wire form; None if none of the kinds is set."""
        kind = proto.WhichOneof("kind")
        if kind is None:
            return None
        if kind == "choices":
            return cls(kind="choice", choices=tuple(proto.choices.texts))
        return cls(kind=kind, source=getattr(proto, kind))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Fully resolved sampling parameters of one request.

    temperature: 0 is greedy, above 0 divides the logits.
    top_k: keep the k most likely tokens; 0 keeps all.
    top_p: keep the smallest set whose probability reaches top_p, in (0, 1].
    min_p: keep tokens at least min_p times as likely as the likeliest, in [0, 1].
    repetition_penalty: divides positive and multiplies negative logits of tokens that prompt
        or answer have; above 0, 1 changes nothing.
    presence_penalty: taken from the logit of every token that the answer has, in [-2, 2].
    frequency_penalty: taken from a token's logit per occurrence in the answer, in [-2, 2].
    logit_bias: (token id, value) pairs, ids rising; the value is added to the logit, in [-100, 100].
    allowed_token_ids: the only ids that may be sampled; empty allows all.
    seed: key of the random numbers, in [0, 2**64).
    max_tokens: most tokens to generate.
    min_tokens: tokens to generate before an end-of-sequence or stop id may be sampled.
    stop_token_ids: ids that end the generation, beside the model's own.
    ignore_eos: do not stop at the model's own end-of-sequence ids.
    logprobs: return the log-probability (of the unfiltered, unpenalised distribution) of each token.
    top_logprobs: and of this many likeliest tokens at its position, at most 20.
    prompt_logprobs: return the log-probabilities of the prompt's tokens, with this many likeliest
        tokens each; None returns none.
    grammar: what the answer must match.

    Raises InvalidRequest, naming the field, for a value outside these ranges.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    seed: int = 0
    max_tokens: int = 128
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _require(0 <= self.temperature <= 100, "temperature", self.temperature, "between 0 and 100")
        _require(0 <= self.top_k <= 2**31 - 1, "top_k", self.top_k, "0 (all tokens) or a positive count")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        _require(0 <= self.seed <= MAX_SEED, "seed", self.seed, "between 0 and 2**64 - 1")
        self._check_penalties()
        self._check_lengths()
        self._check_ids()
        self._check_logprobs()

    def _check_penalties(self) -> None:
        penalty = self.repetition_penalty
        _require(0 < penalty <= 100, "repetition_penalty", penalty, "above 0 and at most 100")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2 <= getattr(self, name) <= 2, name, getattr(self, name), "between -2 and 2")

    def _check_lengths(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        most = f"between 0 and max_tokens ({self.max_tokens})"
        _require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, most)

    def _check_ids(self) -> None:
        num_stop, most_stop = len(self.stop_token_ids), MAX_STOP_TOKEN_IDS
        _require(num_stop <= most_stop, "stop_token_ids", num_stop, f"at most {most_stop} ids")
        num_biased, most_biased = len(self.logit_bias), MAX_LOGIT_BIAS
        _require(num_biased <= most_biased, "logit_bias", num_biased, f"at most {most_biased} ids")
        ids = [token_id for token_id, _ in self.logit_bias]
        if ids != sorted(set(ids)):
            raise InvalidRequest("logit_bias must name each id once, in rising order", field="logit_bias")
        for _, value in self.logit_bias:
            _require(-100 <= value <= 100, "logit_bias", value, "between -100 and 100")

    def _check_logprobs(self) -> None:
        most = f"at most {MAX_TOP_LOGPROBS}"
        _require(0 <= self.top_logprobs <= MAX_TOP_LOGPROBS, "top_logprobs", self.top_logprobs, most)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs; set both", field="top_logprobs")
        if self.prompt_logprobs is not None:
            ok = 0 <= self.prompt_logprobs <= MAX_TOP_LOGPROBS
            _require(ok, "prompt_logprobs", self.prompt_logprobs, most)

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens so far by penalties."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    def check_vocab(self, vocab_size: int) -> None:
        """Raises InvalidRequest, naming the field, for ids or counts that a vocabulary does not have."""
        ids = {
            "logit_bias": [token_id for token_id, _ in self.logit_bias],
            "allowed_token_ids": self.allowed_token_ids,
            "stop_token_ids": self.stop_token_ids,
        }
        for field, token_ids in ids.items():
            for token_id in token_ids:
                _require(0 <= token_id < vocab_size, field, token_id, f"an id below {vocab_size}")
        _require(self.top_logprobs <= vocab_size, "top_logprobs", self.top_logprobs, f"at most {vocab_size}")
        num_prompt = self.prompt_logprobs or 0
        _require(num_prompt <= vocab_size, "prompt_logprobs", num_prompt, f"at most {vocab_size}")

    def to_proto(self) -> common_pb2.SamplingParams:
        """The wire form."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        return common_pb2.SamplingParams(
            **plain,
            logit_bias=dict(self.logit_bias),
            prompt_logprobs=self.prompt_logprobs,
            grammar=None if self.grammar is None else self.grammar.to_proto(),
        )

    @classmethod
    def from_proto(cls, proto: common_pb2.SamplingParams) -> SamplingParams:
        """Reads the wire form; raises InvalidRequest for a value out of range."""
        plain = {name: getattr(proto, name) for name in _PLAIN}
        plain |= {name: tuple(plain[name]) for name in ("allowed_token_ids", "stop_token_ids")}
        return cls(
            **plain,
            logit_bias=tuple(sorted(proto.logit_bias.items())),
            prompt_logprobs=proto.prompt_logprobs if proto.HasField("prompt_logprobs") else None,
            grammar=Grammar.from_proto(proto.grammar),
        )


# Fields whose wire form is the value itself.
_PLAIN = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "allowed_token_ids",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "top_logprobs",
)


def _schema_text(schema: Mapping[str, object]) -> str:
    try:
        return json.dumps(dict(schema))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the JSON schema cannot be written as JSON: {error}", field="grammar") from None


def _require(ok: bool, field: str, value: float, allowed: str) -> None:
    # NaN fails every comparison, so it arrives here as not ok.
    if not ok or (isinstance(value, float) and math.isnan(value)):
        raise InvalidRequest(f"{field} is {value}; it must be {allowed}", field=field)
