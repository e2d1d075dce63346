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


async def dies_alone(stage: Stage, decode: Any, number: int) -> None:
    """The next prefill worker gives the request a step of its own, and is gone in it."""
    worker = await stage.prefill(f"prefill-{number}")
    command = await to_prefill(worker, decode)
    assert command.sequence.alone
    worker.send(alone_step={"attempt_id": command.attempt_id})
    stage.kill(worker.identity.name)


async def test_after_two_deaths_it_runs_alone_and_two_deaths_in_its_own_steps_end_it() -> None:
    async with staged(resume_wait_s=30.0) as stage:
        decode, run = await begun(stage)
        await dies_alone(stage, decode, 2)
        # Once may be a coincidence.
        aborted = await decode.command("abort_if_uncommitted")
        decode.gone(aborted.attempt_id)
        await decode.command("release")
        await dies_alone(stage, decode, 3)
        with pytest.raises(PoisonRequest, match=r"died 4 times .* 2 times in a step"):
            await run.answer()
        await until(lambda: stage.held() == NOTHING)


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
