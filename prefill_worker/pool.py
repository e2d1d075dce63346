"""The pool of prefill workers. `python -m baton.pool` finds it here by its name."""

from __future__ import annotations

from baton.pool.worker_pool import WorkerPool
from prefill_worker.actor import PrefillWorker


class PrefillPool(WorkerPool):
    """Prefill workers as named actors: prefill-0, prefill-1, ..."""

    actor_class = PrefillWorker
