"""Sampling parameters: what they mean, which values are legal, and their wire form.

Filters apply in this order, on fp32 logits: temperature, top_k, top_p, min_p
(the order of transformers' processors). A draw is Gumbel-argmax over the
surviving tokens with Philox4x32-10 numbers keyed by the seed (engine/philox.py);
ties go to the lowest token id. SAMPLER_VERSION changes whenever any of this does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.errors import InvalidRequest
from baton.v1 import common_pb2

SAMPLER_VERSION = 1
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Fully resolved sampling parameters of one request.

    temperature: 0 is greedy, above 0 divides the logits.
    top_k: keep the k most likely tokens; 0 keeps all.
    top_p: keep the smallest set whose probability reaches top_p, in (0, 1].
    min_p: keep tokens at least min_p times as likely as the likeliest, in [0, 1].
    seed: key of the random numbers, in [0, 2**64).
    max_tokens: most tokens to generate.
    stop_token_ids: ids that end the generation, beside the model's own.
    ignore_eos: do not stop at the model's own end-of-sequence ids.
    logprobs: return the log-probability (of the unfiltered distribution) of each token.

    Raises InvalidRequest, naming the field, for a value outside these ranges.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False

    def __post_init__(self) -> None:
        _require(0 <= self.temperature <= 100, "temperature", self.temperature, "between 0 and 100")
        _require(0 <= self.top_k <= 2**31 - 1, "top_k", self.top_k, "0 (all tokens) or a positive count")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        _require(0 <= self.seed <= MAX_SEED, "seed", self.seed, "between 0 and 2**64 - 1")
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(len(self.stop_token_ids) <= 64, "stop_token_ids", len(self.stop_token_ids), "at most 64 ids")

    def to_proto(self) -> common_pb2.SamplingParams:
        """The wire form."""
        return common_pb2.SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=self.max_tokens,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
        )

    @classmethod
    def from_proto(cls, proto: common_pb2.SamplingParams) -> SamplingParams:
        """Reads the wire form; raises InvalidRequest for a value out of range."""
        return cls(
            temperature=proto.temperature,
            top_k=proto.top_k,
            top_p=proto.top_p,
            min_p=proto.min_p,
            seed=proto.seed,
            max_tokens=proto.max_tokens,
            stop_token_ids=tuple(proto.stop_token_ids),
            ignore_eos=proto.ignore_eos,
            logprobs=proto.logprobs,
        )


def _require(ok: bool, field: str, value: float, allowed: str) -> None:
    # NaN fails every comparison, so it arrives here as not ok.
    if not ok or (isinstance(value, float) and math.isnan(value)):
        raise InvalidRequest(f"{field} is {value}; it must be {allowed}", field=field)
