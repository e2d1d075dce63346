"""Sampled tokens and scores on their way to the router and to the other worker.

The one place where what the engine yields becomes a message, as kvtransfer/sequence.py is the
one place for the way in.
"""

from __future__ import annotations

from baton.errors import InvalidRequest
from baton.v1 import common_pb2
from engine.events import TokenSampled
from engine.step_results import PromptLogprobs
from kvtransfer.contract import FirstToken
from kvtransfer.sequence import FINISH_REASONS


def write_token(event: TokenSampled) -> common_pb2.TokenEvent:
    """The message of a token that has just been sampled."""
    request = event.request
    return common_pb2.TokenEvent(
        attempt_id=request.attempt_id,
        start_index=request.num_output_tokens - 1,
        token_ids=[event.token_id],
        logprobs=[event.logprob] if request.params.logprobs else [],
        finish_reason=FINISH_REASONS[request.finish_reason],
        top_logprobs=_write_top(event.top),
    )


def write_first_token(attempt_id: bytes, token: FirstToken) -> common_pb2.TokenEvent:
    """The message of a token that another worker has sampled."""
    return common_pb2.TokenEvent(
        attempt_id=attempt_id,
        start_index=token.start_index,
        token_ids=[token.token_id],
        logprobs=[] if token.logprob is None else [token.logprob],
        top_logprobs=_write_top(token.top),
    )


def read_first_token(event: common_pb2.TokenEvent) -> FirstToken:
    """What write_first_token() wrote; raises InvalidRequest unless there is exactly one token."""
    tops = event.top_logprobs
    if len(event.token_ids) != 1 or len(event.logprobs) > 1 or len(tops) > 1:
        raise InvalidRequest("a commit carries exactly one first token", field="first_token")
    if any(len(top.token_ids) != len(top.logprobs) for top in tops):
        raise InvalidRequest("top_logprobs needs as many ids as log-probabilities", field="first_token")
    return FirstToken(
        token_id=event.token_ids[0],
        logprob=event.logprobs[0] if event.logprobs else None,
        start_index=event.start_index,
        top=tuple(pair for top in tops for pair in zip(top.token_ids, top.logprobs, strict=True)),
    )


def write_prompt_logprobs(attempt_id: bytes, scores: PromptLogprobs) -> common_pb2.PromptLogprobs:
    """The message of a chunk's scores."""
    wanted = scores.top.token_ids.shape[1] > 0
    rows = zip(scores.top.token_ids.tolist(), scores.top.logprobs.tolist(), strict=True)
    return common_pb2.PromptLogprobs(
        attempt_id=attempt_id,
        start_index=scores.start_index,
        logprobs=scores.logprobs.tolist(),
        top_logprobs=[common_pb2.TopLogprobs(token_ids=ids, logprobs=logprobs) for ids, logprobs in rows]
        if wanted
        else [],
    )


def _write_top(top: tuple[tuple[int, float], ...]) -> list[common_pb2.TopLogprobs]:
    """One entry, or none if the request does not want any."""
    if not top:
        return []
    token_ids, logprobs = zip(*top, strict=True)
    return [common_pb2.TopLogprobs(token_ids=token_ids, logprobs=logprobs)]
