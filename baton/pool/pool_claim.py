"""That a namespace of a Ray cluster has one pool: two would each keep, drain and renew the same workers.

The claim is a named actor, which is not detached: Ray frees its name with the process that made it.
"""

from __future__ import annotations

import os
import socket
from typing import Any, Final

import ray
from ray.exceptions import RayError

# No worker has this name.
NAME: Final = "pool"
ANSWER_WITHIN_S: Final = 5.0


class PoolClaim:
    """The actor. Ray's dashboard shows the class by this name. It does nothing.

    owner: the process that has the claim, for people.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner

    def owner(self) -> str:
        """Who has the claim."""
        return self._owner


def stake(namespace: str) -> Any:
    """Makes the claim, which holds as long as what is returned; raises ValueError if there is one."""
    actor = ray.remote(PoolClaim).options(name=NAME, namespace=namespace, num_cpus=0, max_restarts=-1)
    return actor.remote(f"process {os.getpid()} on {socket.gethostname()}")


def owner_of(namespace: str) -> str:
    """Who has the claim, for people."""
    try:
        actor = ray.get_actor(NAME, namespace=namespace)
        return str(ray.get(actor.owner.remote(), timeout=ANSWER_WITHIN_S))
    except (ValueError, RayError):
        return "a process that does not say who it is"
