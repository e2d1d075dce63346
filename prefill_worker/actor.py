"""A prefill worker as a Ray actor."""

from __future__ import annotations

from baton.pool.actor import WorkerActor
from prefill_worker.serve import ROLE


class PrefillWorker(WorkerActor):
    """Runs one prefill worker. Ray's dashboard shows the class by this name."""

    role = ROLE
