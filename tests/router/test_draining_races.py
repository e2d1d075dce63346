"""Workers that drain, and what crosses: last words, ends of sessions, attempts on their way."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import KvTransferFailed
from baton.failure import to_failure
from tests.fakes import until
from tests.router.stage import staged, to_prefill, workers
from tests.router.test_draining import DRAINING, blamed, drains, link_of, outcomes


@pytest.mark.parametrize("prefill_says", [DRAINING, to_failure(KvTransferFailed("refused"))])
@pytest.mark.parametrize("decode_says", ["failed", "preempted"])
async def test_the_last_word_of_a_decode_worker_that_was_left_counts_whatever_the_other_said(
    prefill_says: Any, decode_says: str
) -> None:
    async with staged(max_attempts=1) as stage:
        prefill, first = await workers(stage)
        run = stage.generate(max_tokens=1)
        command = await to_prefill(prefill, first)
        second = await stage.decode("decode-1")
        next_prefill = await stage.prefill("prefill-1") if prefill_says is DRAINING else prefill
        drains(first)
        await until(lambda: not link_of(stage, first).is_ready)
        # Both are heard before the attempt has its turn: the link has left by then.
        prefill_link, decode_link = link_of(stage, prefill), link_of(stage, first)
        prefill_link._hear(prefill.up(ended={"attempt_id": command.attempt_id, "failure": prefill_says}))
        last: dict[str, Any] = {"attempt_id": command.attempt_id}
        if decode_says == "failed":
            last["failure"] = DRAINING
        decode_link._hear(first.up(**{decode_says: last}))
        assert decode_link._session is None
        again = await to_prefill(next_prefill, second)
        next_prefill.first_token(again, 70, end=True)
        next_prefill.ended(again.attempt_id, finished=True)
        assert await run.answer() == [70]
        assert blamed(stage, run)[:2] == (1, 0.0)
        assert outcomes(run) == ["DRAINING" if decode_says == "failed" else "PREEMPTED", "OK"]
        assert run.generation._avoid == set()


async def test_a_session_that_broke_and_has_not_ended_yet_tells_the_attempt() -> None:
    async with staged() as stage:
        prefill, first = await workers(stage)
        run = stage.generate(max_tokens=1)
        command = await to_prefill(prefill, first)
        second = await stage.decode("decode-1")
        # From now on nothing can be sent; the reader has yet to notice.
        stage.cut_off("decode-0")
        failed = to_failure(KvTransferFailed("the target is gone"))
        link_of(stage, prefill)._hear(prefill.up(ended={"attempt_id": command.attempt_id, "failure": failed}))
        again = await to_prefill(prefill, second)
        prefill.first_token(again, 70, end=True)
        prefill.ended(again.attempt_id, finished=True)
        assert await run.answer() == [70]
        assert outcomes(run) == ["PEER_LOST", "OK"]
        reason = run.generation._timeline.explain.attempts[0].reason
        assert reason.startswith("decode-0 was lost")


async def test_a_worker_that_ends_its_session_before_an_attempt_came_has_left_as_planned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with staged(max_attempts=1) as stage:
        first, decode = await workers(stage)
        run = stage.generate(max_tokens=1)
        await until(lambda: stage.held()["asked"] > 0)
        drains(first)
        await until(lambda: not link_of(stage, first).is_ready)
        # Its patience is over, with the attempt still at the decode worker.
        stage.dialer.cut("prefill-0")
        await until(lambda: link_of(stage, first)._session is None)
        assert link_of(stage, first).status().state == "draining"
        second = await stage.prefill("prefill-1")
        await decode.grant()
        await decode.command("release")
        again = await to_prefill(second, decode)
        second.first_token(again, 70, end=True)
        second.ended(again.attempt_id, finished=True)
        assert await run.answer() == [70]
        assert blamed(stage, run) == (1, 0.0, [0, 0, 0])
        assert outcomes(run) == ["DRAINING", "OK"]
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
