"""Pairs: workers that meet are introduced to each other, and attempts go only where KV can go."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.errors import IncompatiblePeer, KvTransferFailed, PeerLost, Unavailable
from baton.failure import to_failure
from baton.v1 import prefill_service_pb2
from router.prefill_link import PrefillLink
from tests.fakes import until
from tests.router.stage import NOTHING, PlayedDecode, Run, Stage, failure, info_of, staged, to_prefill

OTHER_MODEL = IncompatiblePeer("num_layers differs: [30 != 31]", field="num_layers")
NOT_REACHED = PeerLost("decode-0 does not answer")


def pair_command(decode: PlayedDecode) -> prefill_service_pb2.PairCommand:
    return prefill_service_pb2.PairCommand(
        worker=decode.identity.name,
        incarnation=decode.identity.incarnation,
        address=f"kv-of-{decode.identity.name}",
    )


def part_command(decode: PlayedDecode) -> prefill_service_pb2.PartCommand:
    return prefill_service_pb2.PartCommand(incarnation=decode.identity.incarnation)


def shown(stage: Stage, name: str = "prefill-0") -> list[tuple[str, str, str]]:
    """The pairs of a prefill worker in the status."""
    link = next(link for link in stage.fleet.links if link.name == name)
    return [(pair.worker, pair.transport, pair.reason) for pair in link.status().pairs]


async def workers_of(stage: Stage, run: Run) -> tuple[str, str]:
    """Names of the workers that a request was placed on, as both of them see it."""
    await until(lambda: stage.held()["attempts"] == 1)
    decode: Any = next(link for link in stage.fleet.decode_links() if link.num_attempts)
    prefill: Any = next(link for link in stage.fleet.prefill_links() if link.spent)
    run.task.cancel()
    await asyncio.wait([run.task])
    await until(lambda: stage.held() == NOTHING)
    return prefill.name, decode.name


async def test_a_decode_worker_that_comes_later_is_introduced() -> None:
    async with staged() as stage:
        prefill = await stage.prefill()
        assert prefill.introductions == []
        decode = await stage.decode()
        assert prefill.introductions == [pair_command(decode)]


async def test_a_prefill_worker_that_comes_later_is_told_of_all_decode_workers() -> None:
    async with staged() as stage:
        first, second = await stage.decode("decode-0"), await stage.decode("decode-1")
        prefill = await stage.prefill()
        assert prefill.introductions == [pair_command(first), pair_command(second)]


async def test_changes_of_capacity_introduce_nobody_again_and_draining_parts_nobody() -> None:
    async with staged() as stage:
        prefill, decode = await stage.prefill(budget=100), await stage.decode()
        stage.generate(max_tokens=3)
        command = await to_prefill(prefill, decode)
        prefill.first_token(command, 70)
        prefill.grant(50)
        await until(lambda: stage.fleet.prefill_links()[0].credit == 150)
        stage.registry.announce(info_of(decode, "decode", draining=True))
        await until(lambda: not list(stage.fleet.decode_links()))
        second = await stage.decode("decode-1")
        # Answered after anything that was sent before.
        prefill.send(credit_reclaim={"tokens": 1})
        await prefill.command("credit_return")
        assert prefill.introductions == [pair_command(decode), pair_command(second)]


async def test_a_lost_decode_worker_is_parted_from_all_prefill_workers() -> None:
    async with staged() as stage:
        prefills = [await stage.prefill("prefill-0"), await stage.prefill("prefill-1")]
        lost, left = await stage.decode("decode-0"), await stage.decode("decode-1")
        stage.kill("decode-0")
        for prefill in prefills:
            await until(lambda prefill=prefill: len(prefill.introductions) == 3)
            assert prefill.introductions == [pair_command(lost), pair_command(left), part_command(lost)]
        assert shown(stage) == [("decode-1", "grpc", "")]


async def test_a_decode_worker_whose_session_was_only_cut_is_parted_and_introduced_again() -> None:
    async with staged() as stage:
        prefill, decode = await stage.prefill(), await stage.decode()
        stage.dialer.cut("decode-0")
        await until(lambda: len(prefill.introductions) == 3)
        assert prefill.introductions == [pair_command(decode), part_command(decode), pair_command(decode)]
        await until(lambda: stage.fleet.is_complete)


async def test_a_prefill_worker_whose_session_was_cut_hears_everything_again() -> None:
    async with staged() as stage:
        prefill, decode = await stage.prefill(), await stage.decode()
        lost = stage.fleet.prefill_links()[0]
        stage.dialer.cut("prefill-0")
        await until(lambda: not lost.is_ready)
        assert not lost.can_reach(decode.identity.incarnation)
        await until(lambda: len(prefill.introductions) == 2)
        assert prefill.introductions == [pair_command(decode)] * 2
        await until(lambda: stage.fleet.is_complete)


async def test_a_status_of_a_decode_worker_that_is_gone_changes_nothing() -> None:
    async with staged() as stage:
        prefill, decode = await stage.prefill(), await stage.decode()
        stage.kill("decode-0")
        await until(lambda: part_command(decode) in prefill.introductions)
        prefill.pair_status(decode.identity.incarnation, transport="shm")
        prefill.send(credit_reclaim={"tokens": 1})
        await prefill.command("credit_return")
        assert shown(stage) == []


async def test_the_status_names_the_transport_and_why_it_is_not_a_faster_one() -> None:
    async with staged() as stage:
        prefill, decode = await stage.prefill(), await stage.decode()
        await stage.decode("a-decode")
        prefill.pair_status(decode.identity.incarnation, transport="shm", note="nixl is not installed")
        await until(lambda: shown(stage)[1][1] == "shm")
        assert shown(stage) == [("a-decode", "grpc", ""), ("decode-0", "shm", "nixl is not installed")]


async def test_requests_wait_until_a_pair_is_reached() -> None:
    async with staged(resume_wait_s=60.0) as stage:
        prefill = await stage.prefill(unreachable={"decode-0": NOT_REACHED})
        decode = await stage.decode()
        run = stage.generate()
        await until(lambda: len(stage.queue) == 1)
        assert stage.held() == NOTHING | {"queued": 1}
        assert shown(stage) == [("decode-0", "", "decode-0 does not answer")]
        prefill.pair_status(decode.identity.incarnation, transport="grpc")
        assert await workers_of(stage, run) == ("prefill-0", "decode-0")


async def test_a_pair_that_breaks_gets_no_more_requests() -> None:
    async with staged(resume_wait_s=60.0) as stage:
        prefill, decode = await stage.prefill(), await stage.decode()
        prefill.pair_status(decode.identity.incarnation, failure=to_failure(NOT_REACHED))
        await until(lambda: not stage.fleet.is_complete)
        stage.generate()
        await until(lambda: len(stage.queue) == 1)
        assert stage.held() == NOTHING | {"queued": 1}


async def test_a_refused_pair_is_named_and_the_cluster_serves_with_another() -> None:
    async with staged() as stage:
        # More credit and more blocks: the refused pair would be preferred.
        await stage.prefill("prefill-0", budget=4096, unreachable={"decode-0": OTHER_MODEL})
        await stage.decode("decode-0", num_blocks=1000)
        await stage.decode("decode-1", num_blocks=10)
        assert shown(stage) == [("decode-0", "", "num_layers differs: [30 != 31]"), ("decode-1", "grpc", "")]
        for _ in range(4):
            assert await workers_of(stage, stage.generate()) == ("prefill-0", "decode-1")


async def test_of_two_workers_each_only_those_that_reach_each_other_work_together() -> None:
    async with staged() as stage:
        await stage.prefill("prefill-0", budget=4096, unreachable={"decode-0": OTHER_MODEL})
        await stage.prefill("prefill-1", budget=100, unreachable={"decode-1": OTHER_MODEL})
        await stage.decode("decode-0", num_blocks=1000)
        await stage.decode("decode-1", num_blocks=10)
        runs = [stage.generate(num_prompt_tokens=60) for _ in range(3)]
        await until(lambda: stage.held()["asked"] > 0 and len(stage.queue) < 3)
        prefills = {link.name: link.spent for link in stage.fleet.prefill_links()}
        asked = {link.name: link.num_asked for link in stage.fleet.decode_links()}
        # Of ten blocks one request takes four: decode-1 has room for two, and prefill-1 serves the third.
        assert (prefills, asked) == ({"prefill-0": 120, "prefill-1": 60}, {"decode-0": 1, "decode-1": 2})
        assert len(runs) == 3


async def test_a_prefill_worker_that_reaches_no_able_decode_worker_is_skipped() -> None:
    async with staged() as stage:
        await stage.prefill("prefill-0", budget=4096, unreachable={"decode-1": OTHER_MODEL})
        await stage.prefill("prefill-1", budget=100, unreachable={"decode-0": OTHER_MODEL})
        await stage.decode("decode-0", num_blocks=1)
        await stage.decode("decode-1", num_blocks=10)
        assert await workers_of(stage, stage.generate(num_prompt_tokens=60)) == ("prefill-1", "decode-1")


async def test_what_only_an_unreachable_worker_could_hold_blocks_nobody() -> None:
    async with staged(max_wait_s=0.0) as stage:
        await stage.prefill(unreachable={"large": OTHER_MODEL})
        await stage.decode("small", num_blocks=10)
        await stage.decode("large", num_blocks=100)
        run = stage.generate(num_prompt_tokens=700)
        assert "703 tokens of KV" in str(await failure(run))
        assert await workers_of(stage, stage.generate()) == ("prefill-0", "small")


async def test_an_open_breaker_leads_to_the_pair_of_the_others() -> None:
    async with staged() as stage:
        await stage.prefill("prefill-0", budget=4096, unreachable={"decode-1": OTHER_MODEL})
        await stage.prefill("prefill-1", budget=100, unreachable={"decode-0": OTHER_MODEL})
        await stage.decode("decode-0", num_blocks=100)
        await stage.decode("decode-1", num_blocks=10)
        broken = next(link for link in stage.fleet.links if link.name == "decode-0")
        for _ in range(5):
            broken.breaker.failed(asyncio.get_running_loop().time())
        # prefill-0 is above suspicion, but reaches nobody else.
        assert await workers_of(stage, stage.generate()) == ("prefill-1", "decode-1")


async def test_if_all_pairs_are_refused_a_request_fails_by_name_after_the_grace() -> None:
    async with staged(resume_wait_s=0.2) as stage:
        await stage.prefill(unreachable={"decode-0": OTHER_MODEL})
        await stage.decode()
        started = asyncio.get_running_loop().time()
        error = await failure(stage.generate())
        assert asyncio.get_running_loop().time() - started > 0.1
        assert isinstance(error, Unavailable)
        assert str(error) == "no prefill worker can reach a decode worker: num_layers differs: [30 != 31]"
        assert error.retry_after_s == 5.0
        assert stage.held() == NOTHING


async def test_workers_that_meet_while_the_cluster_is_down_get_the_grace_to_reach_each_other() -> None:
    async with staged(resume_wait_s=0.01) as stage:
        prefill = await stage.prefill(unreachable={"decode-0": NOT_REACHED})
        with pytest.raises(Unavailable, match="no decode worker is connected"):
            raise await failure(stage.generate())
        stage.dispatcher._grace_s = 60.0
        decode = await stage.decode()
        run = stage.generate()
        await until(lambda: len(stage.queue) == 1)
        prefill.pair_status(decode.identity.incarnation, transport="grpc")
        assert await workers_of(stage, run) == ("prefill-0", "decode-0")


async def test_a_pair_that_is_still_being_tried_is_waited_for_and_then_its_word_counts() -> None:
    async with staged(resume_wait_s=0.01) as stage:
        prefill = await stage.prefill()
        prefill.silent_about.add("decode-0")
        network = asyncio.create_task(stage.decode())
        await until(lambda: bool(prefill.introductions))
        run = stage.generate()
        await until(lambda: len(stage.queue) == 1)
        await asyncio.sleep(0.05)  # five times the grace
        assert len(stage.queue) == 1
        prefill.pair_status(prefill.introductions[0].incarnation, failure=to_failure(OTHER_MODEL))
        error = await failure(run)
        assert str(error) == "no prefill worker can reach a decode worker: num_layers differs: [30 != 31]"
        await network


@pytest.mark.parametrize("error", [KvTransferFailed("decode-0 is not paired"), PeerLost("not paired")])
async def test_an_attempt_whose_prefill_worker_is_not_paired_is_tried_again(error: Unavailable) -> None:
    async with staged() as stage:
        prefill, decode = await stage.prefill(), await stage.decode()
        run = stage.generate(max_tokens=2)
        first = await to_prefill(prefill, decode)
        prefill.grant(first.cost_tokens)
        prefill.ended(first.attempt_id, failure=to_failure(error))
        assert (await decode.command("abort_if_uncommitted")).attempt_id == first.attempt_id
        decode.gone(first.attempt_id)
        await decode.command("release")
        again = await to_prefill(prefill, decode)
        assert again.attempt_id != first.attempt_id
        assert again.target.incarnation == decode.identity.incarnation
        decode.committed(again.attempt_id)
        decode.tokens(again.attempt_id, 0, 70, 71, end=True)
        prefill.ended(again.attempt_id, committed=True)
        assert await run.answer() == [70, 71]


async def test_an_introduction_to_a_session_that_has_just_ended_harms_nobody() -> None:
    async with staged() as stage:
        await stage.prefill("prefill-0")
        link = stage.fleet.prefill_links()[0]
        assert isinstance(link, PrefillLink)
        # The session is closed, and the reader has not noticed yet.
        assert link._session is not None
        link._session.closed = True  # type: ignore[attr-defined]
        decode = await stage.decode()
        assert not link.is_ready
        assert decode.num_sessions == 1
        link._session.closed = False  # type: ignore[attr-defined] # or the other end would never hear
