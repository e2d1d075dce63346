"""A decode worker as a Ray actor."""

from __future__ import annotations

from baton.pool.actor import WorkerActor
from decode_worker.serve import ROLE


class DecodeWorker(WorkerActor):
    """Runs one decode worker. Ray's dashboard shows the class by this name."""

    role = ROLE
