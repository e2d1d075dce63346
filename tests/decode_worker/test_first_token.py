"""The first token at the decode worker: what it came with is repeated to the router."""

from __future__ import annotations

from typing import Any

import pytest

from kvtransfer.contract import Committed, FirstToken
from tests.decode_worker import test_worker
from tests.decode_worker.test_worker import A, rig

TOP = ((4, -0.25), (17, -2.0))


async def test_the_first_tokens_logprobs_survive_the_handoff(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_token(**fields: Any) -> FirstToken:
        return FirstToken(**(fields | {"logprob": -0.25, "top": TOP}))

    monkeypatch.setattr(test_worker, "FirstToken", first_token)
    prompt = list(range(13))
    async with rig() as r:
        lease_id = await r.lease(A, prompt, max_tokens=2, logprobs=True, top_logprobs=2)
        assert await r.prefill.push(A, lease_id, prompt) == Committed()
        assert (await r.router.next("lease_outcome")).committed
        repeated, second = (await r.router.next("step")).tokens[0], (await r.router.next("step")).tokens[0]

    assert (repeated.start_index, list(repeated.logprobs)) == (0, [-0.25])
    (top,) = repeated.top_logprobs
    assert tuple(zip(top.token_ids, top.logprobs, strict=True)) == TOP
    assert (second.start_index, list(second.logprobs)) == (1, [-0.5])
