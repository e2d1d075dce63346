"""Keeps the roles of a cluster running: starts, restarts, adds and removes them, stops them in order.

Owns the processes' lives. It must not know what a role does, nor torch, nor Ray.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial

from baton.cluster.life import Life
from baton.cluster.restart_policy import MAX_QUICK_DEATHS, RestartPolicy, pause_after_leaving_s
from baton.cluster.role_process import RoleProcess, describe_end
from baton.errors import Unavailable
from baton.exit_status import error_of

Report = Callable[[str], None]


class Supervisor:
    """Runs processes until the last one of a role has failed too often.

    report: hears one line, without a newline, about each death.
    rng: spreads the restarts.
    is_settled: false while the cluster starts; until then any death ends the run, because
        a wrong setting is better reported than retried.
    """

    def __init__(self, processes: Sequence[RoleProcess], *, report: Report, rng: random.Random) -> None:
        self.is_settled = False
        self._processes = {process.name: process for process in processes}
        self._lives = {process.name: Life() for process in processes}
        self._report = report
        self._rng = rng
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._broken: asyncio.Future[None] | None = None

    def process(self, name: str) -> RoleProcess:
        """The process of that name; KeyError if there is none."""
        return self._processes[name]

    def life(self, name: str) -> Life:
        """What became of it so far; KeyError if there is none."""
        return self._lives[name]

    @property
    def names(self) -> list[str]:
        """Names of all processes."""
        return list(self._processes)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children that live, by name."""
        return {name: process.pid for name, process in self._processes.items() if process.is_running}

    def staying(self, role: str) -> list[str]:
        """The processes of a role that are not leaving; those that were given up are among them."""
        return [
            name
            for name, process in self._processes.items()
            if process.spec.role == role and self._lives[name].state != "draining"
        ]

    async def run(self) -> None:
        """Starts everything and keeps it running until cancelled.

        Raises Unavailable, with the last lines of the log, when a role cannot be kept; ConfigError or
        ModelError if that is why it does not come up.
        """
        self._broken = asyncio.get_running_loop().create_future()
        try:
            for name in list(self._processes):
                await self._start(name)
            await self._broken
        finally:
            self._broken.cancel()
            keepers = list(self._keepers.values())
            for keeper in keepers:
                keeper.cancel()
            if keepers:
                await asyncio.wait(keepers)

    async def add(self, process: RoleProcess) -> None:
        """Starts one more process and keeps it running; run() must be under way.

        Raises ValueError if the name is taken.
        """
        if process.name in self._processes:
            raise ValueError(f"there is a process {process.name} already")
        self._processes[process.name] = process
        self._lives[process.name] = Life()
        try:
            await self._start(process.name)
        except BaseException:
            # Nobody would ever start it.
            del self._processes[process.name], self._lives[process.name]
            raise

    async def remove(self, name: str, grace_s: float) -> None:
        """Asks a process to end, kills it after grace_s seconds, and forgets it; it is not started again."""
        process, life = self._processes[name], self._lives[name]
        life.state, life.reason = "draining", ""
        keeper = self._keepers.pop(name, None)
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait([keeper])
        await process.stop(grace_s)
        del self._processes[name], self._lives[name]

    async def stop(self, stages: Sequence[Sequence[str]], grace_s: float) -> None:
        """Stops the named processes, one stage after the other; run() must have ended.

        grace_s: how long each process may take before it is killed, in seconds; its spec may add to that.
        """
        for stage in stages:
            async with asyncio.TaskGroup() as group:
                for name in stage:
                    group.create_task(self._processes[name].stop(grace_s))

    def kill(self) -> None:
        """Kills every process at once."""
        for process in self._processes.values():
            process.kill()

    async def _start(self, name: str) -> None:
        process, life = self._processes[name], self._lives[name]
        await process.start()
        life.state = "running"
        keeper = asyncio.create_task(self._keep(process, life), name=f"keep {name}")
        keeper.add_done_callback(partial(self._ended, name))
        self._keepers[name] = keeper

    def _ended(self, name: str, keeper: asyncio.Task[None]) -> None:
        if self._keepers.get(name) is keeper:
            del self._keepers[name]
        error = None if keeper.cancelled() else keeper.exception()
        if error is not None and self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)

    async def _keep(self, process: RoleProcess, life: Life) -> None:
        policy = RestartPolicy(self._rng)
        while True:
            status, lived_s = await process.wait()
            life.state, life.reason = "restarting", describe_end(status)
            end = f"{process.name} {life.reason}"
            if not self.is_settled:
                raise error_of(status)(
                    f"{end} while the cluster was starting. Its log ends with\n{process.last_lines()}"
                )
            # Status 0 is a drain that somebody asked for, and no death.
            pause_s = policy.pause_s(lived_s) if status else pause_after_leaving_s(lived_s)
            if pause_s is None:
                life.state = "failed"
                self._give_up(process, end)
                return
            self._report(f"{end}; starting it again")
            await asyncio.sleep(pause_s)
            await process.start()
            life.state, life.reason = "running", ""
            life.num_restarts += 1

    def _give_up(self, process: RoleProcess, end: str) -> None:
        role = process.spec.role
        left = [name for name in self.staying(role) if self._lives[name].state != "failed"]
        message = f"{end}, {MAX_QUICK_DEATHS} times in a row; it is given up"
        if not left:
            raise Unavailable(
                f"{message}, and no other {role} process is left. Its log ends with\n{process.last_lines()}"
            )
        self._report(f"{message}; {len(left)} of its role are left ({process.log_file})")
