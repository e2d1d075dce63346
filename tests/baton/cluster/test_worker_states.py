"""What a worker is, by what the supervisor knows and what routers see."""

from __future__ import annotations

import pytest

from baton.cluster.life import Life
from baton.cluster.worker_states import ProcessFacts, WorkerStates, with_refusals
from baton.v1 import common_pb2, pool_service_pb2
from baton.v1.admin_service_pb2 import GetClusterStatusResponse, PairState, WorkerStatus


def facts(state: str = "running", *, pid: int = 10, name: str = "decode-0", reason: str = "") -> ProcessFacts:
    life = Life(state=state, reason=reason)
    return ProcessFacts(name=name, role=name.partition("-")[0], life=life, pid=pid)


def view(
    state: str, *, pid: int = 10, attempts: int = 0, reason: str = "", release: str = ""
) -> GetClusterStatusResponse:
    worker = WorkerStatus(
        name="decode-0",
        role=common_pb2.ROLE_DECODE,
        state=state,
        pid=pid,
        num_attempts=attempts,
        reason=reason,
        release=release,
    )
    return GetClusterStatusResponse(workers=[worker])


def state_of(worker: pool_service_pb2.PoolWorker) -> str:
    return pool_service_pb2.PoolWorkerState.Name(worker.state).removeprefix("POOL_WORKER_STATE_")


@pytest.mark.parametrize(
    ("life", "views", "state"),
    [
        ("running", [], "STARTING"),
        ("running", [view("connecting")], "STARTING"),
        ("running", [view("ready")], "SERVING"),
        # One router is enough: requests get there.
        ("running", [view("lost"), view("ready")], "SERVING"),
        # The process of that name before this one.
        ("running", [view("ready", pid=9)], "STARTING"),
        # Who is refused has not told its process id.
        ("running", [view("refused", pid=0, reason="num_layers differs")], "UNHEALTHY"),
        ("running", [view("refused", pid=0, reason="num_layers differs"), view("ready")], "SERVING"),
        ("restarting", [view("refused", pid=0, reason="num_layers differs")], "RESTARTING"),
        ("running", [view("draining")], "DRAINING"),
        ("draining", [view("ready")], "DRAINING"),
        ("restarting", [], "RESTARTING"),
        ("failed", [], "FAILED"),
    ],
)
def test_the_state(life: str, views: list[GetClusterStatusResponse], state: str) -> None:
    (worker,) = WorkerStates("127.0.0.1").update([facts(life, reason="was killed")], views, 0.0)
    assert state_of(worker) == state
    assert bool(worker.reason) == (state != "SERVING")


def test_its_release_is_what_it_told_a_router() -> None:
    views = [view("ready", pid=9, release="0.1.0"), view("connecting"), view("ready", release="0.2.0")]
    (worker,) = WorkerStates("127.0.0.1").update([facts()], views, 0.0)
    assert worker.release == "0.2.0"
    (worker,) = WorkerStates("127.0.0.1").update([facts()], views[:1], 0.0)
    assert worker.release == ""


def test_one_that_has_served_and_is_lost_is_unhealthy() -> None:
    states = WorkerStates("127.0.0.1")
    states.update([facts()], [view("ready")], 0.0)
    (worker,) = states.update([facts()], [view("lost", reason="silent for 2 s")], 1.0)
    assert (state_of(worker), worker.reason) == ("UNHEALTHY", "silent for 2 s")
    # Where routers have nothing against it, it is not said to be at fault.
    (worker,) = states.update([facts()], [], 1.5)
    assert (state_of(worker), worker.reason) == ("UNHEALTHY", "no router has met it yet")
    # The next process of that name is a new one.
    (worker,) = states.update([facts(pid=11)], [], 2.0)
    assert state_of(worker) == "STARTING"


def test_a_worker_that_a_router_refused_has_the_reason() -> None:
    refused = view("refused", pid=0, reason="num_layers differs")
    (worker,) = WorkerStates("127.0.0.1").update([facts()], [refused], 0.0)
    assert (state_of(worker), worker.reason) == ("UNHEALTHY", "num_layers differs")


@pytest.mark.parametrize(
    ("views", "state", "reason"),
    [
        ([view("refused", pid=0, reason="rope differs")], "UNHEALTHY", "rope differs"),
        ([view("refused", pid=0, reason="rope differs"), view("ready")], "SERVING", ""),
        ([view("ready")], "SERVING", ""),
        ([], "SERVING", ""),
    ],
)
def test_a_worker_of_a_pool_that_all_routers_refused_does_not_serve(
    views: list[GetClusterStatusResponse], state: str, reason: str
) -> None:
    serving = pool_service_pb2.PoolWorker(
        name="decode-0", runner="ray", pid=7, state=pool_service_pb2.POOL_WORKER_STATE_SERVING
    )
    (worker,) = with_refusals([serving], views)
    assert (state_of(worker), worker.reason, worker.pid) == (state, reason, 7)


def test_the_time_counts_from_the_change() -> None:
    states = WorkerStates("127.0.0.1")
    (worker,) = states.update([facts()], [], 5.0)
    assert worker.since_ms == 0
    (worker,) = states.update([facts()], [], 7.5)
    assert worker.since_ms == 2500
    (worker,) = states.update([facts()], [view("ready")], 8.0)
    assert worker.since_ms == 0
    # Serving again, but another process.
    (worker,) = states.update([facts(pid=11)], [view("ready", pid=11)], 9.0)
    assert worker.since_ms == 0


def test_attempts_of_all_routers_add_up() -> None:
    views = [view("ready", attempts=2), view("ready", attempts=3), view("ready", pid=9, attempts=100)]
    (worker,) = WorkerStates("127.0.0.1").update([facts()], views, 0.0)
    assert worker.num_attempts == 5
    assert (worker.name, worker.role, worker.node) == ("decode-0", common_pb2.ROLE_DECODE, "127.0.0.1")
    assert (worker.pid, worker.runner) == (10, "process")


@pytest.mark.parametrize(
    ("pairs", "state"),
    [([], "STARTING"), ([""], "STARTING"), (["shm"], "SERVING"), (["", "grpc"], "SERVING")],
)
def test_a_prefill_worker_serves_once_kv_can_go_somewhere(pairs: list[str], state: str) -> None:
    seen = WorkerStatus(
        name="prefill-0",
        role=common_pb2.ROLE_PREFILL,
        state="ready",
        pid=10,
        pairs=[PairState(worker=f"decode-{index}", transport=name) for index, name in enumerate(pairs)],
    )
    (worker,) = WorkerStates("127.0.0.1").update(
        [facts(name="prefill-0")], [GetClusterStatusResponse(workers=[seen])], 0.0
    )
    assert state_of(worker) == state
