"""Several answers to one prompt: when they start, and how they end together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.errors import Unavailable
from router.fanout import Fanout
from tests.fakes import GUARD_S, until


class Played:
    """An answer whose life a test writes."""

    def __init__(self, beside: Any) -> None:
        self.beside = beside
        self.committed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.runs = False
        self.cancelled = False

    async def run(self) -> None:
        self.runs = True
        try:
            await self.outcome
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        finally:
            # As a generation does: who ends without a commit says so.
            if not self.committed.done():
                self.committed.set_result(None)


class Stage:
    def __init__(self, n: int) -> None:
        self.made: list[Played] = []
        self.task = asyncio.create_task(Fanout(n, self.make).run())

    def make(self, index: int, beside: Any) -> Played:
        assert index == len(self.made)
        self.made.append(Played(beside))
        return self.made[-1]

    async def running(self, count: int) -> None:
        await until(lambda: len(self.made) == count and all(played.runs for played in self.made))

    async def end(self) -> None:
        async with asyncio.timeout(GUARD_S):
            await self.task


PLACE: Any = object()


async def test_one_answer_runs_alone() -> None:
    stage = Stage(1)
    await stage.running(1)
    assert not stage.task.done()
    stage.made[0].outcome.set_result(None)
    await stage.end()
    assert [played.beside for played in stage.made] == [None]


async def test_the_others_start_beside_the_first_when_it_is_committed() -> None:
    stage = Stage(3)
    await stage.running(1)
    stage.made[0].committed.set_result(PLACE)
    await stage.running(3)
    assert [played.beside for played in stage.made] == [None, PLACE, PLACE]
    for played in stage.made:
        assert not stage.task.done()
        played.outcome.set_result(None)
    await stage.end()


async def test_they_start_anywhere_when_it_has_ended_without_a_commit() -> None:
    stage = Stage(2)
    await stage.running(1)
    stage.made[0].outcome.set_result(None)
    await stage.running(2)
    assert stage.made[1].beside is None
    stage.made[1].outcome.set_result(None)
    await stage.end()


async def test_a_first_answer_that_fails_is_the_only_one() -> None:
    stage = Stage(3)
    await stage.running(1)
    stage.made[0].outcome.set_exception(Unavailable("lost"))
    with pytest.raises(Unavailable, match="lost"):
        await stage.end()
    assert len(stage.made) == 1


@pytest.mark.parametrize("failing", [0, 2])
async def test_one_that_fails_ends_the_others_first(failing: int) -> None:
    stage = Stage(3)
    await stage.running(1)
    stage.made[0].committed.set_result(PLACE)
    await stage.running(3)
    stage.made[failing].outcome.set_exception(Unavailable("lost"))
    with pytest.raises(Unavailable, match="lost"):
        await stage.end()
    assert [played.cancelled for played in stage.made] == [index != failing for index in range(3)]


@pytest.mark.parametrize("committed", [False, True])
async def test_a_cancel_ends_all(committed: bool) -> None:
    stage = Stage(2)
    await stage.running(1)
    if committed:
        stage.made[0].committed.set_result(PLACE)
        await stage.running(2)
    stage.task.cancel()
    await asyncio.wait([stage.task])
    assert stage.task.cancelled()
    assert all(played.cancelled for played in stage.made)
