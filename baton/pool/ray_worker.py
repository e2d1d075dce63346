"""A worker's actor as its pool sees it. Calls go straight to the actor, not through Ray's control service."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, TypeVar

from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError

from baton.errors import ConfigError, ModelError
from baton.health import WorkerHealth, WorkerLoad
from baton.pool.health_watch import ANSWER_WITHIN_S
from baton.pool.runtime import Place, WorkerAnswer, WorkerFacts, WorkerLost

ValueT = TypeVar("ValueT", Place, WorkerFacts, WorkerHealth, WorkerLoad)

_NO_LOAD: Final = {field.name: 0 for field in fields(WorkerLoad)}
# Ray calls an actor unavailable until it knows whether the actor has died.
_UNSURE_PAUSE_S: Final = 0.2


class RayWorker:
    """One named actor, of a class that derives from WorkerActor.

    node_id: the node of this process.
    """

    def __init__(self, actor: Any, node_id: str) -> None:
        self.actor = actor
        self._node_id = node_id
        self._facts: WorkerFacts | None = None
        self._asking: asyncio.Future[Any] | None = None

    @property
    def actor_id(self) -> str:
        """Ray's identifier, as its dashboard shows it."""
        return str(self.actor._actor_id.hex())

    async def facts(self) -> WorkerFacts:
        """Waits for the constructor; raises WorkerLost if it fails."""
        said = await self._sure("facts")
        try:
            place = _read(Place, said["place"])
            self._facts = _read(WorkerFacts, {"digest": "", **said, "place": place})
        except (KeyError, TypeError) as error:
            raise WorkerLost(f"it is of another version, and its facts lack something: {error}") from None
        return self._facts

    async def ask(self) -> WorkerAnswer | None:
        """How it is; None if it does not answer in time. A late answer counts for the next question."""
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._answer())
            # Nobody looks any more if the worker ends meanwhile; asyncio shall not complain of that.
            self._asking.add_done_callback(lambda asking: asking.cancelled() or asking.exception())
        done, _ = await asyncio.wait({self._asking}, timeout=ANSWER_WITHIN_S)
        if not done:
            return None
        asked, self._asking = self._asking, None
        try:
            answer = asked.result()
        except RayTaskError as error:
            health = WorkerHealth(is_ready=False, is_alive=False, reason=_last_words(error))
            return WorkerAnswer(health=health, load=None, is_draining=False)
        except RayError:
            # Whether it has died is for ended() to say.
            return None
        return _read_answer(answer)

    async def ended(self) -> None:
        """Returns when it has drained and left; raises WorkerLost when it ends otherwise."""
        while not await self._sure("wait_ended"):
            pass

    async def drain(self) -> None:
        """Tells it to leave; raises WorkerLost if it is gone."""
        await self._sure("drain")

    def kill_process(self) -> None:
        """Ends its process, if that runs on this node. Ray itself takes 5 s to end one that is stopped."""
        if self._is_here() and self._facts is not None and _is_worker(self._facts.pid):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self._facts.pid, signal.SIGKILL)

    def _is_here(self) -> bool:
        return self._facts is not None and self._facts.place.node_id == self._node_id

    async def _answer(self) -> Any:
        return await self.actor.look.remote()

    async def _sure(self, method: str) -> Any:
        """Calls a method that may be called again, until Ray is sure how it ended."""
        while True:
            try:
                return await getattr(self.actor, method).remote()
            except ActorDiedError as error:
                raise _lost(error) from None
            except RayActorError:
                # Without its control service Ray never knows.
                if self._is_here() and self._facts is not None and not _is_worker(self._facts.pid):
                    raise WorkerLost("its process is gone") from None
                await asyncio.sleep(_UNSURE_PAUSE_S)
            except RayError as error:
                raise _lost(error) from None


def _read_answer(said: Mapping[str, Any]) -> WorkerAnswer:
    """A worker of another version may say more, or less; whoever answers counts as alive."""
    health, load = {"is_ready": False, "is_alive": True, **said.get("health", {})}, said.get("load")
    return WorkerAnswer(
        health=_read(WorkerHealth, health),
        load=None if load is None else _read(WorkerLoad, {**_NO_LOAD, **load}),
        is_draining=said.get("is_draining", False),
    )


def _read(kind: type[ValueT], said: Mapping[str, Any]) -> ValueT:
    """What this version knows of what was said; raises TypeError where something is missing."""
    known = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in said.items() if name in known})


def _is_worker(pid: int) -> bool:
    """Whether that process of this machine runs a Ray actor: the id may have passed on to another."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::")
    return False


def _lost(error: RayError) -> WorkerLost:
    """What a constructor raised comes as the text of a traceback; its last line names the class."""
    words = _last_words(error)
    for kind in (ModelError, ConfigError):
        name = f"{kind.__module__}.{kind.__qualname__}: "
        if words.startswith(name):
            return WorkerLost(words.removeprefix(name), kind)
    return WorkerLost(words)


def _last_words(error: RayError) -> str:
    """The rest is a traceback through Ray; the worker's own log has it where it matters."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
