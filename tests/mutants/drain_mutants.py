"""Bugs of nodes that are told to leave."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from baton.drain import Drain
from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from router.link import WorkerLink
from tests.mutants.mutant import Mutant, registering

MUTANTS: list[Mutant] = []
mutant = registering(MUTANTS)


@mutant("a worker that leaves goes on taking requests, and never ends", seed=6)
def takes_work_while_leaving() -> Any:
    return patch.object(Drain, "check", lambda self: None)


@mutant("answers are cut off when the grace time of their decode worker is over", seed=6)
def answers_not_handed_over() -> Any:
    return patch.object(DecodeWorker, "_hand_over", lambda self, error: None)


@mutant("prompts are cut off when the grace time of their prefill worker is over", seed=152)
def prompts_not_handed_over() -> Any:
    return patch.object(PrefillWorker, "_hand_over", lambda self, error: None)


@mutant("a router goes on placing on a worker that has said that it leaves", seed=5)
def draining_not_heard() -> Any:
    return patch.object(WorkerLink, "drain", lambda self: None)
