"""What a step yields for each of its chunks: the way back from arrays.

The counterpart of engine/batch_builder.py. Owns the order of rows. Changes no
request; that is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from baton.errors import BatonError, InvalidRequest, NonFiniteLogits
from engine.batch import Float32Array, TopTokens

if TYPE_CHECKING:
    from baton.sampling import SamplingParams
    from engine.batch import Scores, StepOutput
    from engine.batch_builder import Chunk
    from engine.request import Request


class SampledToken(NamedTuple):
    """A sampled token; logprob is 0 and top empty unless the request wants them.

    top: (token id, logprob) of the likeliest tokens, in the order of engine.batch.TopTokens.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of consecutive prompt tokens.

    start_index: index of the first of them in the prompt.
    logprobs: [n] float32.  top: of [n, K], K being what the request wants.
    """

    start_index: int
    logprobs: Float32Array
    top: TopTokens


class ChunkResult(NamedTuple):
    """What became of one chunk: a token, scores of prompt tokens, or an error of the request's own."""

    chunk: Chunk
    token: SampledToken | None
    prompt_logprobs: PromptLogprobs | None
    error: BatonError | None


def split_output(chunks: Sequence[Chunk], output: StepOutput) -> Iterator[ChunkResult]:
    """The results of a step's chunks, in their order."""
    # Lists, because a step has many rows and a number out of an array costs ten times as much.
    finite_rows, token_ids, logprobs = (
        output.finite.tolist(),
        output.token_ids.tolist(),
        output.logprobs.tolist(),
    )
    num_sampled = num_scored = 0
    for sequence, chunk in enumerate(chunks):
        row = num_sampled if chunk.samples else None
        num_sampled += chunk.samples
        rows = slice(num_scored, num_scored + len(chunk.scored))
        num_scored = rows.stop
        finite = row is None or finite_rows[row]
        if chunk.scored and output.scores is not None:
            finite = finite and bool(output.scores.finite[rows].all())
        if not finite:
            yield ChunkResult(chunk, None, None, _nonfinite(output.nonfinite_at.get(sequence)))
        elif row is None:
            yield ChunkResult(chunk, None, _prompt_logprobs(chunk, output.scores, rows), None)
        elif row in output.mask_errors:
            yield ChunkResult(chunk, None, None, output.mask_errors[row])
        elif row in output.blocked:
            yield ChunkResult(chunk, None, None, _blocked(chunk.request))
        else:
            token = SampledToken(token_ids[row], logprobs[row], _top(output, row, chunk.request.params))
            yield ChunkResult(chunk, token, _prompt_logprobs(chunk, output.scores, rows), None)


def _top(output: StepOutput, row: int, params: SamplingParams) -> tuple[tuple[int, float], ...]:
    count = params.top_logprobs
    if not count or output.top is None:
        return ()
    ids, logprobs = output.top.token_ids[row, :count], output.top.logprobs[row, :count]
    return tuple(zip(ids.tolist(), logprobs.tolist(), strict=True))


def _prompt_logprobs(chunk: Chunk, scores: Scores | None, rows: slice) -> PromptLogprobs | None:
    if not chunk.scored or scores is None:
        return None
    count = chunk.request.params.prompt_logprobs
    return PromptLogprobs(
        start_index=chunk.scored.start,
        logprobs=scores.logprobs[rows],
        top=TopTokens(
            token_ids=scores.top.token_ids[rows, :count], logprobs=scores.top.logprobs[rows, :count]
        ),
    )


def _nonfinite(place: str | None) -> NonFiniteLogits:
    where = f"they first appear in {place}" if place else "the setting debug_nonfinite names the layer"
    return NonFiniteLogits(f"the model produced NaN or infinite logits for this request; {where}")


def _blocked(request: Request) -> InvalidRequest:
    params = request.params
    causes = {
        "grammar": request.mask is not None,
        "allowed_token_ids": bool(params.allowed_token_ids),
        "min_tokens": request.num_output_tokens < params.min_tokens,
    }
    fields = [field for field, holds in causes.items() if holds]
    return InvalidRequest(
        f"no token may be sampled: {' and '.join(fields)} together exclude them all; loosen one",
        field=fields[0] if fields else "logit_bias",
    )
