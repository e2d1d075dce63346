"""A decode worker as a Ray actor."""

from __future__ import annotations

from baton.pool.actor import WorkerActor
from baton.pool.serving_thread import ServedRole
from decode_worker.config import DecodeConfig
from decode_worker.serve import serve


class DecodeWorker(WorkerActor):
    """Runs one decode worker. Ray's dashboard shows the class by this name."""

    role = ServedRole("decode", DecodeConfig, serve)
