"""A request under which workers die runs alone after two deaths, and fails by name if it is the reason."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import PoisonRequest
from tests.fakes import until
from tests.router.stage import NOTHING, Run, Stage, staged, to_prefill


async def dies_while_prefilling(stage: Stage, decode: Any, number: int) -> Any:
    """The next prefill worker takes the request and is gone; returns the command it had."""
    worker = await stage.prefill(f"prefill-{number}")
    command = await to_prefill(worker, decode)
    stage.kill(worker.identity.name)
    await decode.command("abort_if_uncommitted")
    decode.gone(command.attempt_id)
    await decode.command("release")
    return command


async def begun(stage: Stage) -> tuple[Any, Run]:
    """A request that two prefill workers have died of, or with."""
    decode = await stage.decode()
    run = stage.generate(max_tokens=3)
    for number in range(2):
        command = await dies_while_prefilling(stage, decode, number)
        assert not command.sequence.alone
    return decode, run


async def lost_alone(stage: Stage, decode: Any, number: int, *, is_only_cut: bool = False) -> None:
    """The next prefill worker gives the request a step of its own, and is gone in it, or cut off."""
    name = f"prefill-{number}"
    worker = await stage.prefill(name)
    command = await to_prefill(worker, decode)
    assert command.sequence.alone
    worker.send(alone_step={"attempt_id": command.attempt_id})
    if is_only_cut:
        stage.cut_off(name)
    else:
        stage.kill(name)
    await decode.command("abort_if_uncommitted")
    decode.gone(command.attempt_id)
    await decode.command("release")


@pytest.fixture
def quick_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.suspicion.VERDICT_S", 0.1)


@pytest.mark.usefixtures("quick_verdict")
async def test_after_two_deaths_it_runs_alone_and_two_deaths_in_its_own_steps_end_it() -> None:
    async with staged(resume_wait_s=30.0) as stage:
        decode, run = await begun(stage)
        # Once may be a coincidence.
        await lost_alone(stage, decode, 2)
        await lost_alone(stage, decode, 3)
        with pytest.raises(PoisonRequest, match=r"died 4 times .* 2 times in a step"):
            await run.answer()
        await until(lambda: stage.held() == NOTHING)


@pytest.mark.usefixtures("quick_verdict")
async def test_a_worker_that_is_only_cut_off_has_not_died_of_it() -> None:
    async with staged(resume_wait_s=30.0) as stage:
        decode, run = await begun(stage)
        await lost_alone(stage, decode, 2)
        await lost_alone(stage, decode, 3, is_only_cut=True)
        healthy = await stage.prefill("prefill-4")
        again = await to_prefill(healthy, decode)
        healthy.first_token(again, 70, end=True)
        healthy.ended(again.attempt_id, finished=True)
        assert await run.answer() == [70]


@pytest.mark.usefixtures("quick_verdict")
async def test_a_worker_that_was_only_cut_off_and_left_as_planned_later_has_not_died_of_it() -> None:
    async with staged(resume_wait_s=30.0) as stage:
        decode, run = await begun(stage)
        worker = await stage.prefill("prefill-2")
        command = await to_prefill(worker, decode)
        worker.send(alone_step={"attempt_id": command.attempt_id})
        await until(lambda: run.generation._suspicion.runs_alone)
        stage.dialer.cut("prefill-2")
        await decode.command("abort_if_uncommitted")
        # It is back, leaves as it says, and is forgotten, all before anybody asks.
        await until(lambda: worker.num_sessions == 2 and bool(stage.fleet.prefill_links()))
        worker.send(heartbeat={"num_free_blocks": worker.num_blocks, "is_draining": True})
        await until(lambda: not stage.fleet.prefill_links())
        stage.kill("prefill-2")
        await until(lambda: [link.name for link in stage.fleet.links] == ["decode-0"])
        decode.gone(command.attempt_id)
        await decode.command("release")
        # The only loss in a step of its own that counts: twice would be needed.
        await lost_alone(stage, decode, 3)
        healthy = await stage.prefill("prefill-4")
        again = await to_prefill(healthy, decode)
        healthy.first_token(again, 70, end=True)
        healthy.ended(again.attempt_id, finished=True)
        assert await run.answer() == [70]


async def test_a_death_beside_its_own_step_is_not_its_fault() -> None:
    async with staged(resume_wait_s=30.0) as stage:
        decode, run = await begun(stage)
        worker = await stage.prefill("prefill-2")
        command = await to_prefill(worker, decode)
        worker.send(alone_step={"attempt_id": command.attempt_id})
        worker.send(alone_step={"attempt_id": command.attempt_id, "ended": True})
        stage.kill("prefill-2")
        await decode.command("abort_if_uncommitted")
        decode.gone(command.attempt_id)
        await decode.command("release")
        healthy = await stage.prefill("prefill-3")
        again = await to_prefill(healthy, decode)
        assert again.sequence.alone
        healthy.first_token(again, 70, end=True)
        healthy.ended(again.attempt_id, finished=True)
        assert await run.answer() == [70]
