"""The pool of decode workers. `python -m baton.pool` finds it here by its name."""

from __future__ import annotations

from baton.pool.worker_pool import WorkerPool
from decode_worker.actor import DecodeWorker


class DecodePool(WorkerPool):
    """Decode workers as named actors: decode-0, decode-1, ..."""

    actor_class = DecodeWorker
