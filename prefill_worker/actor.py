"""A prefill worker as a Ray actor."""

from __future__ import annotations

from baton.pool.actor import WorkerActor
from baton.pool.serving_thread import ServedRole
from prefill_worker.config import PrefillConfig
from prefill_worker.serve import serve


class PrefillWorker(WorkerActor):
    """Runs one prefill worker. Ray's dashboard shows the class by this name."""

    role = ServedRole("prefill", PrefillConfig, serve)
