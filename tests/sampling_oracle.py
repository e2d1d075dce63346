"""What a generation must yield, computed without the engine: transformers' model and processors, and an
independent Philox and Gumbel-argmax in NumPy. docs/sampling.md states the rules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from baton.sampling import SamplingParams

# Two choices whose scores are closer than this may legitimately differ.
TIE = 1e-4
_NUM_DISTURBED = 6

# Of an answer so far: which tokens may come next, [V] bool.
Mask = Callable[[Sequence[int]], np.ndarray]


@dataclass
class OracleAnswer:
    """tokens, logprobs, and of each place the likeliest tokens with their logprobs.

    finish_reason: "stop" or "length".
    tie_at: index of the first token that a disturbance of TIE could change; what follows may differ.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: str = "length"
    tie_at: int | None = None

    @property
    def num_certain(self) -> int:
        """Leading tokens that every correct implementation yields."""
        return len(self.tokens) if self.tie_at is None else self.tie_at


def oracle_tokens(
    model: PreTrainedModel,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    eos_token_ids: Collection[int] = (),
    sample_index: int = 0,
    mask: Mask | None = None,
) -> OracleAnswer:
    """The answer to one prompt."""
    answer = OracleAnswer()
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    while len(answer.tokens) < params.max_tokens:
        with torch.inference_mode():
            # Without a cache: nothing that could go wrong in one is in the expectation.
            context = torch.tensor([[*prompt, *answer.tokens]])
            logits = model(context, use_cache=False, logits_to_keep=1).logits[0, -1].float()
        token_id, is_tie = choose(
            logits, prompt, answer.tokens, params, stops=stops, sample_index=sample_index, mask=mask
        )
        if is_tie and answer.tie_at is None:
            answer.tie_at = len(answer.tokens)
        logprobs = exact_logprobs(logits)
        answer.tokens.append(token_id)
        answer.logprobs.append(float(logprobs[token_id]))
        answer.top.append(likeliest(logits, params.top_logprobs))
        if token_id in stops:
            answer.finish_reason = "stop"
            break
    return answer


def oracle_prompt_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], num_top: int
) -> list[tuple[float, list[tuple[int, float]]]]:
    """Logprob and likeliest tokens of prompt[1], prompt[2], ...: entry t comes from the logits at t - 1."""
    with torch.inference_mode():
        logits_TV = model(torch.tensor([list(prompt)])).logits[0].float()
    return [
        (float(exact_logprobs(logits_TV[t - 1])[prompt[t]]), likeliest(logits_TV[t - 1], num_top))
        for t in range(1, len(prompt))
    ]


def choose(
    logits_V: torch.Tensor,
    prompt: Sequence[int],
    answer: Sequence[int],
    params: SamplingParams,
    *,
    stops: Collection[int] = (),
    sample_index: int = 0,
    mask: Mask | None = None,
) -> tuple[int, bool]:
    """The next token, and whether a disturbance of the logits by TIE would choose another.

    stops: all ids that end this answer.
    """
    disturbed = _disturbed(logits_V)
    input_ids = torch.tensor([[*prompt, *answer]] * len(disturbed))
    scores_NV = _edited(disturbed, input_ids, params, answer=answer, stops=stops, mask=mask)
    if params.temperature >= 1e-5:
        scores_NV = filtered(scores_NV, params)
        position = len(prompt) + len(answer)
        noise_V = gumbel(logits_V.shape[0], params.seed, position, sample_index)
        scores_NV = scores_NV + torch.from_numpy(noise_V)
    # NumPy's argmax takes the first of equals, which is the lowest id.
    choices = scores_NV.numpy().argmax(axis=-1)
    return int(choices[0]), bool((choices != choices[0]).any())


def filtered(scores_NV: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Temperature and filters; -inf where a token does not survive."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(params.temperature))])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    # As softmax sees them: relative to the best, so that a tiny temperature does not overflow.
    relative = scores_NV - scores_NV.amax(dim=-1, keepdim=True)
    return warpers(torch.zeros(len(scores_NV), 1, dtype=torch.int64), relative)


def _edited(
    logits_NV: torch.Tensor,
    input_ids: torch.Tensor,
    params: SamplingParams,
    *,
    answer: Sequence[int],
    stops: Collection[int],
    mask: Mask | None,
) -> torch.Tensor:
    scores = logits_NV
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))(input_ids, scores)
    # OpenAI's formula: mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence.
    counts = torch.from_numpy(np.bincount(np.array(answer, np.int64), minlength=scores.shape[1]))
    scores = scores - counts * params.frequency_penalty - (counts > 0) * params.presence_penalty
    if params.logit_bias:
        biases = {(token_id,): float(value) for token_id, value in params.logit_bias}
        scores = SequenceBiasLogitsProcessor(biases)(input_ids, scores)
    if params.min_tokens and stops:
        num_prompt_tokens = input_ids.shape[1] - len(answer)
        held_back = MinNewTokensLengthLogitsProcessor(num_prompt_tokens, params.min_tokens, sorted(stops))
        scores = held_back(input_ids, scores)
    if params.allowed_token_ids:
        allowed = list(params.allowed_token_ids)
        scores = PrefixConstrainedLogitsProcessor(lambda _batch, _sent: allowed, 1)(input_ids, scores)
    if mask is not None:
        scores = scores.masked_fill(~torch.from_numpy(mask(answer)), -torch.inf)
    return scores


def _disturbed(logits_V: torch.Tensor) -> torch.Tensor:
    """[1 + _NUM_DISTURBED, V]: the logits, and copies with noise of up to TIE / 2."""
    rng = np.random.default_rng(0)
    noise = rng.choice([-TIE / 2, TIE / 2], (_NUM_DISTURBED, len(logits_V))).astype(np.float32)
    return torch.cat([logits_V[None], logits_V + torch.from_numpy(noise)])


def exact_logprobs(logits_V: torch.Tensor) -> np.ndarray:
    """[V] float64 log-softmax."""
    logits = logits_V.double().numpy()
    best = logits.max()
    return logits - best - np.log(np.exp(logits - best).sum())


def likeliest(logits_V: torch.Tensor, count: int) -> list[tuple[int, float]]:
    """The likeliest tokens with their logprobs, of equally likely ones the lowest id first."""
    logprobs = exact_logprobs(logits_V)
    order = np.argsort(-logits_V.numpy(), kind="stable")[:count]
    return [(int(token_id), float(logprobs[token_id])) for token_id in order]


def gumbel(vocab_size: int, seed: int, position: int, sample_index: int, purpose: int = 0) -> np.ndarray:
    """[vocab_size] float32 Gumbel numbers of one row."""
    blocks = np.arange(-(-vocab_size // 4), dtype=np.uint64)
    counter = [blocks, *(np.full_like(blocks, word) for word in (position, sample_index, purpose))]
    words = np.stack(philox(counter, [seed % 2**32, seed // 2**32]), axis=1).reshape(-1)[:vocab_size]
    uniform = ((words >> np.uint64(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2**-23)
    return -np.log(-np.log(uniform))


def philox(counter: list[np.ndarray], key: list[int]) -> list[np.ndarray]:
    """Philox4x32-10 as Salmon et al. define it; words of 32 bits in uint64."""
    low, high = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        product0 = np.uint64(0xD2511F53) * counter[0]
        product1 = np.uint64(0xCD9E8D57) * counter[2]
        counter = [
            (product1 >> high) ^ counter[1] ^ np.uint64(key[0]),
            product1 & low,
            (product0 >> high) ^ counter[3] ^ np.uint64(key[1]),
            product0 & low,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter
