"""Keeps the roles of a cluster running: starts them, restarts them, stops them in order.

Owns the processes' lives. It must not know what a role does, nor torch, nor Ray.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from baton.cluster.restart_policy import MAX_QUICK_DEATHS, RestartPolicy
from baton.cluster.role_process import RoleProcess, describe_end
from baton.errors import Unavailable

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
        self._report = report
        self._rng = rng
        self._given_up: set[str] = set()

    def process(self, name: str) -> RoleProcess:
        """The process of that name; KeyError if there is none."""
        return self._processes[name]

    @property
    def names(self) -> list[str]:
        """Names of all processes."""
        return list(self._processes)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children that live, by name."""
        return {name: process.pid for name, process in self._processes.items() if process.is_running}

    async def run(self) -> None:
        """Starts everything and keeps it running until cancelled.

        Raises Unavailable, with the last lines of the log, when a role cannot be kept.
        """
        for process in self._processes.values():
            await process.start()
        tasks = [
            asyncio.create_task(self._keep(process), name=f"keep {process.name}")
            for process in self._processes.values()
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def stop(self, stages: Sequence[Sequence[str]], grace_s: float) -> None:
        """Stops the named processes, one stage after the other; run() must have ended.

        grace_s: how long each stage may take before it is killed, in seconds.
        """
        for stage in stages:
            async with asyncio.TaskGroup() as group:
                for name in stage:
                    group.create_task(self._processes[name].stop(grace_s))

    def kill(self) -> None:
        """Kills every process at once."""
        for process in self._processes.values():
            process.kill()

    async def _keep(self, process: RoleProcess) -> None:
        policy = RestartPolicy(self._rng)
        while True:
            status, lived_s = await process.wait()
            end = f"{process.name} {describe_end(status)}"
            if not self.is_settled:
                raise Unavailable(
                    f"{end} while the cluster was starting. Its log ends with\n{process.last_lines()}"
                )
            pause_s = policy.pause_s(lived_s)
            if pause_s is None:
                self._give_up(process, end)
                return
            self._report(f"{end}; starting it again")
            await asyncio.sleep(pause_s)
            await process.start()

    def _give_up(self, process: RoleProcess, end: str) -> None:
        self._given_up.add(process.name)
        role = process.spec.role
        left = [p for p in self._processes.values() if p.spec.role == role and p.name not in self._given_up]
        message = f"{end}, {MAX_QUICK_DEATHS} times in a row; it is given up"
        if not left:
            raise Unavailable(
                f"{message}, and no other {role} process is left. Its log ends with\n{process.last_lines()}"
            )
        self._report(f"{message}; {len(left)} of its role are left ({process.log_file})")
