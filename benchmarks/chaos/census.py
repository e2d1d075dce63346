"""The processes that descend from this one and have a role in the cluster, found by their command lines.

Knows how roles are started and how Redis's and Ray's servers are called. It signals nobody.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress

import psutil

from benchmarks.chaos.socket_owner import owner_of

REDIS = "redis"
GCS = "gcs"
_SERVERS = {"redis-server": REDIS, "gcs_server": GCS}
_ROLES = frozenset({"router", "prefill_worker", "decode_worker", "baton.pool"})
_NAME_FLAG = "--name="
POOL = "pool"
# Between two looks at all processes: where nobody seems to have a connection, and because one may be new.
_SHORTEST_S = 1.0
_LONGEST_S = 10.0


class Census:
    """Who is who.

    A look at all processes takes a tenth of a second on a busy machine, in which nothing else is done; so it
    looks no more often than needed, and at a known process only to see that it lives.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._looked_at = -math.inf

    def pids(self) -> dict[str, int]:
        """Process ids of the living ones by name: "router-0", "prefill-0", "redis", "gcs", "pool"."""
        if self._forget_dead() or time.monotonic() - self._looked_at > _LONGEST_S:
            self._look()
        return {name: pid for pid, name in dict(self._names).items()}

    def pid(self, name: str) -> int:
        """The living process of that name; KeyError if there is none."""
        self._forget_dead()
        if name not in self._names.values():
            self._look()
        return {known: pid for pid, known in dict(self._names).items()}[name]

    def owner(self, port: int) -> str:
        """The name of whose connection comes from this port; "" if it is gone, or its owner very young.

        It may run beside the other methods, in a thread.
        """
        owner = self._owner(port)
        if not owner and time.monotonic() - self._looked_at > _SHORTEST_S:
            self._look()
            owner = self._owner(port)
        return owner

    def _owner(self, port: int) -> str:
        names = dict(self._names)
        pid = owner_of(port, names)
        return "" if pid is None else names[pid]

    def _forget_dead(self) -> bool:
        """Whether there were any."""
        dead = [pid for pid in list(self._names) if not is_alive(pid)]
        for pid in dead:
            self._names.pop(pid, None)
        return bool(dead)

    def _look(self) -> None:
        for process in psutil.Process().children(recursive=True):
            if process.pid not in self._names:
                with suppress(psutil.Error):
                    if name := name_of(process.cmdline()):
                        self._names[process.pid] = name
        self._forget_dead()
        self._looked_at = time.monotonic()


def name_of(command: list[str]) -> str:
    """The name of a process with this command line; "" if it has no role."""
    if not command:
        return ""
    program = command[0].rpartition("/")[2].split(" ")[0]
    if program in _SERVERS:
        return _SERVERS[program]
    if "-m" not in command[:-1]:
        return ""
    module = command[command.index("-m") + 1]
    if module not in _ROLES:
        return ""
    names = [argument.removeprefix(_NAME_FLAG) for argument in command if argument.startswith(_NAME_FLAG)]
    return names[0] if names else POOL


def is_alive(pid: int) -> bool:
    """Whether a process runs, or is stopped; one that has ended and was not waited for does not."""
    with suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
