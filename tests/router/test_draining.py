"""Workers that drain: they get nothing new, end or hand over what they have, and are left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton.errors import Draining, Overloaded, PeerLost, Unavailable
from baton.failure import to_failure
from baton.ports import WorkerInfo
from baton.v1 import admin_service_pb2
from router.admin import RouterAdminServicer
from router.events import Inbox
from tests.fakes import until
from tests.router.acting import virtually
from tests.router.stage import (
    NOTHING,
    PlayedDecode,
    PlayedPrefill,
    PlayedWorker,
    Run,
    Stage,
    failure,
    info_of,
    staged,
    to_decode,
    to_prefill,
    workers,
)

# Virtual time, in which anybody who was to be dialled again would have been.
REDIALLED_S = 10.0
DRAINING = to_failure(Draining("it is about to leave"))


def link_of(stage: Stage, worker: PlayedWorker) -> Any:
    """The router's link to that very process."""
    return next(x for x in stage.fleet.links if x.incarnation == worker.identity.incarnation)


def drains(worker: PlayedPrefill | PlayedDecode) -> None:
    worker.send(heartbeat={"num_free_blocks": worker.num_blocks, "is_draining": True})


def is_left(worker: PlayedWorker) -> bool:
    """Whether the router has ended its session."""
    return worker.session is not None and worker.session._other is not None and worker.session._other.closed


def blamed(stage: Stage, run: Run) -> tuple[int, float, list[int]]:
    """Attempts counted, retries used up, and failures on the workers' records."""
    retries = stage.dispatcher.retries
    records = [link.breaker._num_failures for link in stage.fleet.links]
    return run.generation._timeline.num_attempts, retries._capacity - retries._left, records


def outcomes(run: Run) -> list[str]:
    return [attempt.outcome for attempt in run.generation._timeline.explain.attempts]


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["heartbeat", "registry"])
def test_an_idle_worker_is_left_at_once_shown_and_not_dialled_again(role: str, how: str) -> None:
    async def main() -> None:
        async with staged() as stage:
            found = dict(zip(("prefill", "decode"), await workers(stage), strict=True))
            worker: Any = found[role]
            if how == "heartbeat":
                drains(worker)
            else:
                stage.registry.announce(info_of(worker, role, draining=True))
            await until(lambda: is_left(worker))
            link = link_of(stage, worker)
            await until(lambda: link._session is None)
            await asyncio.sleep(REDIALLED_S)
            assert worker.num_sessions == 1
            assert (link.is_ready, link.is_connected, link.status().state) == (False, False, "draining")
            stage.registry.withdraw(worker.identity.name)
            await until(lambda: len(stage.fleet.links) == 1)

    virtually(main())


def test_a_worker_that_drains_already_is_not_dialled() -> None:
    async def main() -> None:
        async with staged() as stage:
            worker = PlayedDecode("decode-0", 50, 64)
            stage.dialer.workers["decode-0"] = worker.serve
            stage.registry.announce(info_of(worker, "decode", draining=True))
            await until(lambda: bool(stage.fleet.links))
            await asyncio.sleep(REDIALLED_S)
            assert worker.num_sessions == 0
            assert [link.status().state for link in stage.fleet.links] == ["draining"]
            # Restarted, it is another process.
            await stage.decode("decode-0")
            assert [link.is_ready for link in stage.fleet.links] == [True]

    virtually(main())


def test_a_worker_that_takes_no_session_because_it_drains_is_not_asked_again() -> None:
    async def main() -> None:
        async with staged() as stage:
            asked = []

            @asynccontextmanager
            async def refusing(info: WorkerInfo) -> AsyncIterator[Any]:
                asked.append(info.name)
                raise Draining("the worker is leaving and takes no new work")
                yield

            stage.dialer.open = refusing  # type: ignore[method-assign]
            worker = PlayedDecode("decode-0", 50, 64)
            stage.registry.announce(info_of(worker, "decode"))
            await until(lambda: any(link.is_draining for link in stage.fleet.links))
            await asyncio.sleep(REDIALLED_S)
            assert asked == ["decode-0"]
            assert [link.status().state for link in stage.fleet.links] == ["draining"]

    virtually(main())


async def test_a_request_in_hand_is_ended_and_new_ones_go_elsewhere() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        run = stage.generate(max_tokens=3)
        attempt_id = await to_decode(prefill, decode)
        drains(decode)
        await until(lambda: not link_of(stage, decode).is_ready)
        other = await stage.decode("decode-1")
        stage.generate(max_tokens=2)
        await to_prefill(prefill, other)
        assert not is_left(decode)
        decode.tokens(attempt_id, 1, 71)
        decode.tokens(attempt_id, 2, 72, end=True)
        assert await run.answer() == [70, 71, 72]
        await until(lambda: is_left(decode))
        assert blamed(stage, run) == (1, 0.0, [0, 0, 0])


async def test_kv_still_goes_to_a_decode_worker_that_drains_until_it_is_left() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        run = stage.generate(max_tokens=2)
        command = await to_prefill(prefill, decode)
        drains(decode)
        await until(lambda: not link_of(stage, decode).is_ready)
        (paired,) = prefill.introductions
        prefill.first_token(command, 70)
        decode.committed(command.attempt_id)
        decode.tokens(command.attempt_id, 1, 71, end=True)
        prefill.ended(command.attempt_id, committed=True)
        assert await run.answer() == [70, 71]
        await until(lambda: len(prefill.introductions) == 2)
        assert prefill.introductions[1].incarnation == paired.incarnation
        assert is_left(decode)


async def test_a_refusal_of_a_worker_that_drains_costs_nothing_and_is_the_last_one() -> None:
    async with staged(max_attempts=1) as stage:
        prefill, first = await workers(stage)
        run = stage.generate(max_tokens=1)
        await first.refuse(DRAINING)
        await until(lambda: not link_of(stage, first).is_ready)
        second = await stage.decode("decode-1")
        command = await to_prefill(prefill, second)
        prefill.first_token(command, 70, end=True)
        prefill.ended(command.attempt_id, finished=True)
        assert await run.answer() == [70]
        assert blamed(stage, run) == (1, 0.0, [0, 0, 0])
        assert run.generation._timeline.num_handovers == 1
        assert outcomes(run) == ["DRAINING", "OK"]
        assert stage.held() == NOTHING


async def test_what_a_decode_worker_hands_over_goes_on_with_its_tokens_at_once() -> None:
    async with staged(max_attempts=1) as stage:
        prefill, first = await workers(stage)
        run = stage.generate(num_prompt_tokens=20, max_tokens=4)
        attempt_id = await to_decode(prefill, first)
        second = await stage.decode("decode-1")
        drains(first)
        first.tokens(attempt_id, 1, 71)
        first.send(failed={"attempt_id": attempt_id, "failure": DRAINING})
        resumed = await to_prefill(prefill, second)
        assert list(resumed.sequence.token_ids) == [*range(20), 70, 71]
        prefill.first_token(resumed, 72, start=2)
        second.committed(resumed.attempt_id)
        second.tokens(resumed.attempt_id, 3, 73, end=True)
        prefill.ended(resumed.attempt_id, committed=True)
        assert await run.answer() == [70, 71, 72, 73]
        assert blamed(stage, run) == (1, 0.0, [0, 0, 0])
        assert run.generation._timeline.timings().num_handovers == 1
        assert run.generation._avoid == set()
        assert is_left(first)


async def test_a_prompt_that_a_prefill_worker_hands_over_is_computed_elsewhere() -> None:
    async with staged(max_attempts=1) as stage:
        first, decode = await workers(stage)
        run = stage.generate(max_tokens=1)
        command = await to_prefill(first, decode)
        second = await stage.prefill("prefill-1")
        first.ended(command.attempt_id, failure=DRAINING)
        await decode.command("abort_if_uncommitted")
        decode.gone(command.attempt_id)
        await decode.command("release")
        again = await to_prefill(second, decode)
        second.first_token(again, 70, end=True)
        second.ended(again.attempt_id, finished=True)
        assert await run.answer() == [70]
        assert blamed(stage, run) == (1, 0.0, [0, 0, 0])
        assert outcomes(run) == ["DRAINING", "OK"]
        assert is_left(first)


async def test_a_handover_after_the_commit_changes_nothing() -> None:
    async with staged(max_attempts=1) as stage:
        prefill, decode = await workers(stage)
        run = stage.generate(max_tokens=2)
        command = await to_prefill(prefill, decode)
        prefill.first_token(command, 70)
        prefill.ended(command.attempt_id, failure=DRAINING)
        await decode.command("abort_if_uncommitted")
        decode.committed(command.attempt_id)
        decode.tokens(command.attempt_id, 1, 71, end=True)
        assert await run.answer() == [70, 71]
        assert outcomes(run) == ["OK"]


async def test_a_failure_of_the_transfer_is_still_one() -> None:
    async with staged(max_attempts=1) as stage:
        prefill, decode = await workers(stage)
        run = stage.generate(max_tokens=2)
        command = await to_prefill(prefill, decode)
        prefill.ended(command.attempt_id, failure=to_failure(Unavailable("it failed")))
        await decode.command("abort_if_uncommitted")
        decode.gone(command.attempt_id)
        assert (await failure(run)).code == "KV_TRANSFER_FAILED"  # type: ignore[attr-defined]


async def test_a_worker_that_goes_with_attempts_on_it_is_lost() -> None:
    async with staged() as stage:
        prefill, first = await workers(stage)
        second = await stage.decode("decode-1")
        run = stage.generate(max_tokens=3)
        # Whichever of the two it went to.
        await until(lambda: any(link.num_asked for link in stage.fleet.decode_links()))
        holds = {link.name for link in stage.fleet.decode_links() if link.num_asked}
        leaving, staying = (first, second) if "decode-0" in holds else (second, first)
        await to_decode(prefill, leaving)
        await until(lambda: run.received() == [70])
        drains(leaving)
        await until(lambda: not link_of(stage, leaving).is_ready)
        stage.dialer.cut(leaving.identity.name)
        await to_prefill(prefill, staying)
        assert run.generation._timeline.num_attempts == 2
        assert link_of(stage, leaving).status().state == "lost"
        assert outcomes(run)[0] == "PEER_LOST"


async def test_an_attempt_that_comes_when_its_worker_has_left_is_nobodys_failure() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        drains(decode)
        await until(lambda: is_left(decode))
        with pytest.raises(Draining):
            link_of(stage, decode).attach(Inbox(b"a" * 16))
        stage.dialer.cut("prefill-0")
        lost = link_of(stage, prefill)
        await until(lambda: lost._session is None)
        with pytest.raises(PeerLost):
            lost.attach(Inbox(b"a" * 16))


async def test_a_worker_is_not_left_while_an_attempt_is_on_its_way_to_it() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        run = stage.generate(max_tokens=1)
        # The prefill worker has been chosen, and hears of it once the decode worker has answered.
        await until(lambda: stage.held()["asked"] > 0)
        drains(prefill)
        await until(lambda: not link_of(stage, prefill).is_ready)
        assert not is_left(prefill)
        await decode.grant()
        command = await prefill.command("prefill")
        prefill.first_token(command, 70, end=True)
        prefill.ended(command.attempt_id, finished=True)
        assert await run.answer() == [70]
        await until(lambda: is_left(prefill))


async def test_a_prompt_that_never_reached_a_prefill_worker_lets_it_be_left() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        stage.generate(max_tokens=1)
        await until(lambda: stage.held()["asked"] > 0)
        drains(prefill)
        await until(lambda: not link_of(stage, prefill).is_ready)
        assert not is_left(prefill)
        await decode.refuse(to_failure(Overloaded("full", retry_after_s=60.0)))
        await until(lambda: is_left(prefill))
        told = [prefill.commands.get_nowait() for _ in range(prefill.commands.qsize())]
        assert "prefill" not in {message.WhichOneof("message") for message in told}


async def test_a_death_is_told_once_and_a_leave_is_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with staged() as stage:
        await stage.decode("decode-0")
        leaving = await stage.prefill("prefill-0")
        drains(leaving)
        await until(lambda: is_left(leaving))
        del stage.dialer.workers["decode-0"]
        stage.fleet._rng.uniform = lambda a, b: 0.001  # type: ignore[method-assign, assignment]
        stage.dialer.cut("decode-0")
        await until(lambda: any("does not answer" in link.reason for link in stage.fleet.links))
        redialled = next(link for link in stage.fleet.links if link.name == "decode-0")
        await until(lambda: redialled not in stage.fleet.links)
    warnings = [record.msg for record in caplog.records if record.levelname == "WARNING"]
    assert [(said["event"], said["worker"]) for said in warnings] == [("worker lost", "decode-0")]


async def test_a_lost_worker_is_shown_with_its_reason_until_another_process_has_its_name() -> None:
    async with staged() as stage:
        worker = await stage.decode("decode-0")
        stage.cut_off("decode-0")
        await until(lambda: any("does not answer" in link.reason for link in stage.fleet.links))
        for _ in range(50):
            (status,) = [link.status() for link in stage.fleet.shown_links]
            assert (status.state, bool(status.reason)) == ("lost", True)
            await asyncio.sleep(0.001)
        # Its announcement has yet to end when it is back.
        again = PlayedDecode("decode-0", 77, 64)
        stage.dialer.workers["decode-0"] = again.serve
        stage.registry._infos["its last announcement"] = info_of(worker, "decode")
        stage.registry.announce(info_of(again, "decode"))
        await until(lambda: any(link.is_ready for link in stage.fleet.links))
        assert len(stage.fleet.links) == 2
        assert [link.incarnation for link in stage.fleet.shown_links] == [77]


async def test_the_status_says_who_drains() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        stage.generate(max_tokens=3)
        await to_decode(prefill, decode)
        drains(decode)
        await until(lambda: not link_of(stage, decode).is_ready)
        admin = RouterAdminServicer(core=stage.core, model="m", inference=NoRequests())  # type: ignore[arg-type]
        status = await admin.GetClusterStatus(admin_service_pb2.GetClusterStatusRequest(), None)
        assert [(worker.name, worker.state, worker.num_attempts) for worker in status.workers] == [
            ("decode-0", "draining", 1),
            ("prefill-0", "ready", 0),
        ]


class NoRequests:
    num_requests = 0
