"""Log-probabilities that a prefill worker sends: of its prompt chunk by chunk, and with the first token."""

from __future__ import annotations

import dataclasses

import numpy as np

from engine.batch import ForwardBatch, Int64Array, Scores, StepOutput, TopTokens
from engine.step_runner import OnLayers, StepRunner
from kvtransfer.contract import FirstToken
from tests.prefill_worker.test_worker import A, rig


class Scorer:
    """Adds scores that name what they are of: token t has logprob -t, and its rivals are t + 1, t + 2..."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner

    async def execute(self, batch: ForwardBatch, on_layers: OnLayers | None = None) -> StepOutput:
        output = await self._runner.execute(batch, on_layers)
        top = _rivals(output.token_ids, batch.sampling.num_top_logprobs)
        if batch.scored is None:
            return dataclasses.replace(output, top=top)
        ids = batch.scored.token_ids
        scores = Scores(
            logprobs=-ids.astype(np.float32),
            finite=np.ones(len(ids), np.bool_),
            top=_rivals(ids, batch.scored.num_top_logprobs),
        )
        return dataclasses.replace(output, top=top, scores=scores)


def _rivals(token_ids: Int64Array, count: int) -> TopTokens:
    rivals = token_ids[:, None] + np.arange(count)
    return TopTokens(token_ids=rivals, logprobs=-rivals.astype(np.float32))


async def test_every_prompt_token_but_the_first_is_scored_once_and_before_the_answer() -> None:
    prompt = [60, *range(30, 49)]
    async with rig() as r:
        r.worker._steps._runner = Scorer(r.worker._steps._runner)
        first: list[FirstToken] = []
        r.decode.receiver.on_committed = lambda _lease, token: first.append(token)

        # Chunks of 16 tokens: 16 and 4.
        r.prefill(A, prompt, prompt_logprobs=2, logprobs=True, top_logprobs=3)
        parts = [await r.router.next("prompt_logprobs") for _ in range(2)]
        await r.router.next("credit_grant")
        token = await r.router.next("token")
        assert (await r.router.next("ended")).committed

    assert [(part.attempt_id, part.start_index, len(part.logprobs)) for part in parts] == [
        (A, 1, 16),
        (A, 17, 3),
    ]
    assert [-logprob for part in parts for logprob in part.logprobs] == prompt[1:]
    rivals = [list(entry.token_ids) for part in parts for entry in part.top_logprobs]
    assert rivals == [[token_id, token_id + 1] for token_id in prompt[1:]]
    sampled = token.token_ids[0]
    assert list(token.top_logprobs[0].token_ids) == [sampled, sampled + 1, sampled + 2]
    # The decode worker hears the same with the commit.
    top = tuple((token_id, -float(token_id)) for token_id in token.top_logprobs[0].token_ids)
    assert first == [FirstToken(token_id=sampled, logprob=-0.5, start_index=0, top=top)]


async def test_a_prompt_that_nobody_wants_scored_is_not() -> None:
    async with rig() as r:
        r.worker._steps._runner = Scorer(r.worker._steps._runner)
        r.prefill(A, list(range(20)))
        await r.router.next("credit_grant")
        token = await r.router.next("token")
        assert not token.logprobs
        assert not token.top_logprobs
        assert (await r.router.next("ended")).committed
