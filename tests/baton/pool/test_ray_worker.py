"""What a pool makes of an actor's answers; the actor is played, Ray's errors are its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorPlacementGroupRemoved,
    ActorUnavailableError,
    OutOfMemoryError,
    RayError,
    RayTaskError,
)

from baton.errors import BatonError, ConfigError, ModelError, Unavailable
from baton.health import WorkerHealth, WorkerLoad
from baton.pool.ray_worker import RayWorker
from baton.pool.runtime import Place, WorkerAnswer, WorkerFacts, WorkerLost

PLACE = {"group": "g", "node_id": "n", "address": "10.0.0.1"}
FACTS = {"name": "decode-0", "pid": 7, "address": "10.0.0.1:1", "digest": "d", "place": PLACE}
HEALTH = {"is_ready": True, "is_alive": True, "reason": ""}
LOAD = {"num_attempts": 3, "num_running": 2, "num_waiting": 1, "num_free_blocks": 5, "num_blocks": 8}
LOOK = {"health": HEALTH, "load": LOAD, "is_draining": False}


class PlayedMethod:
    """Answers one outcome after the other."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = list(outcomes)

    async def remote(self) -> Any:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class PlayedActor:
    def __init__(self, **methods: PlayedMethod) -> None:
        self.__dict__.update(methods)


def worker(**methods: PlayedMethod) -> RayWorker:
    return RayWorker(PlayedActor(**methods), "here")


def failed() -> RayTaskError:
    return RayTaskError("look", "Traceback\n  ...\nValueError: no such field", ValueError("no such field"))


async def test_the_end_is_asked_for_until_it_has_come() -> None:
    method = PlayedMethod(False, False, ActorUnavailableError("it does not answer", None), True)
    await worker(wait_ended=method).ended()
    assert method.outcomes == []


@pytest.mark.parametrize(
    "error",
    [
        ActorDiedError,
        ActorPlacementGroupRemoved,
        lambda: OutOfMemoryError("its node has no memory left"),
        failed,
    ],
)
async def test_whatever_ray_says_of_a_call_that_failed_the_worker_is_lost(
    error: Callable[[], RayError],
) -> None:
    for name in ("facts", "wait_ended", "drain"):
        played = worker(**{name: PlayedMethod(error())})
        ask = {"facts": played.facts, "wait_ended": played.ended, "drain": played.drain}[name]
        with pytest.raises(WorkerLost) as caught:
            await ask()
        assert caught.value.reason


@pytest.mark.parametrize(
    ("name", "kind"),
    [("baton.errors.ModelError", ModelError), ("baton.errors.ConfigError", ConfigError), ("E", Unavailable)],
)
async def test_the_error_of_a_constructor_is_known_by_its_class(name: str, kind: type[BatonError]) -> None:
    cause = RayTaskError("__init__", f"Traceback\n  ...\n{name}: no head", ValueError("no head"))
    with pytest.raises(WorkerLost) as caught:
        await worker(facts=PlayedMethod(ActorDiedError(cause))).facts()
    assert caught.value.error is kind
    assert caught.value.reason == ("no head" if kind is not Unavailable else "E: no head")


@pytest.mark.parametrize(
    "error",
    [ActorDiedError, lambda: OutOfMemoryError("its node has no memory left")],
)
async def test_a_question_that_ray_could_not_bring_is_no_answer(error: Callable[[], RayError]) -> None:
    assert await worker(look=PlayedMethod(error())).ask() is None


async def test_a_question_at_which_the_worker_failed_is_a_bad_answer() -> None:
    assert await worker(look=PlayedMethod(failed())).ask() == WorkerAnswer(
        health=WorkerHealth(is_ready=False, is_alive=False, reason="ValueError: no such field"),
        load=None,
        is_draining=False,
    )


async def test_what_a_later_version_says_beyond_is_ignored() -> None:
    played = worker(
        facts=PlayedMethod({**FACTS, "weights": "w", "place": {**PLACE, "rack": "r"}}),
        look=PlayedMethod(
            {"health": {**HEALTH, "mood": 1}, "load": {**LOAD, "num_sad": 1}, "is_draining": True}
        ),
    )
    assert await played.facts() == WorkerFacts(
        name="decode-0", pid=7, address="10.0.0.1:1", digest="d", place=Place(**PLACE)
    )
    assert await played.ask() == WorkerAnswer(
        health=WorkerHealth(is_ready=True, is_alive=True), load=WorkerLoad(**LOAD), is_draining=True
    )


async def test_what_an_earlier_version_does_not_say_kills_nobody() -> None:
    answer = await worker(
        look=PlayedMethod({"health": {"is_ready": True}, "load": {"num_attempts": 3}})
    ).ask()
    assert answer == WorkerAnswer(
        health=WorkerHealth(is_ready=True, is_alive=True),
        load=WorkerLoad(num_attempts=3, num_running=0, num_waiting=0, num_free_blocks=0, num_blocks=0),
        is_draining=False,
    )
    assert await worker(look=PlayedMethod(LOOK)).ask() is not None


async def test_a_worker_that_does_not_say_where_it_is_cannot_be_kept() -> None:
    facts = {key: value for key, value in FACTS.items() if key != "place"}
    with pytest.raises(WorkerLost, match="another version, and its facts lack something: 'place'"):
        await worker(facts=PlayedMethod(facts)).facts()
    without_digest = {key: value for key, value in FACTS.items() if key != "digest"}
    # It counts as one with other settings.
    assert (await worker(facts=PlayedMethod(without_digest)).facts()).digest == ""
