from __future__ import annotations

from baton.cluster.fleet_news import FleetNews
from baton.v1 import pool_service_pb2
from baton.v1.pool_service_pb2 import ListWorkersResponse, PoolWorker


def worker(
    state: str, *, pid: int = 1, runner: str = "ray", reason: str = "", name: str = "decode-0"
) -> PoolWorker:
    value = pool_service_pb2.PoolWorkerState.Value(f"POOL_WORKER_STATE_{state}")
    return PoolWorker(name=name, state=value, pid=pid, runner=runner, reason=reason)


def told(*lists: list[PoolWorker], silent_ms: tuple[int, ...] = ()) -> list[str]:
    """What is told about each list after the first."""
    news = FleetNews()
    silences = silent_ms or (0,) * len(lists)
    lines = [
        news.lines(ListWorkersResponse(workers=workers, ray_silent_ms=silent))
        for workers, silent in zip(lists, silences, strict=True)
    ]
    assert lines[0] == []
    return [line for later in lines[1:] for line in later]


def test_nothing_new_is_nothing_told() -> None:
    assert told([worker("SERVING")], [worker("SERVING")]) == []


def test_an_actor_that_dies_and_comes_back() -> None:
    assert told(
        [worker("SERVING")],
        [worker("RESTARTING", pid=0, reason="its process is gone")],
        [worker("STARTING", pid=2)],
        [worker("SERVING", pid=2)],
    ) == ["decode-0 is restarting: its process is gone", "decode-0 is back (process 2)"]


def test_a_return_between_two_looks_is_told_too() -> None:
    assert told([worker("SERVING")], [worker("SERVING", pid=2)]) == ["decode-0 is back (process 2)"]


def test_the_death_of_a_process_is_told_by_the_supervisor() -> None:
    assert told(
        [worker("SERVING", runner="process")],
        [worker("RESTARTING", pid=0, runner="process")],
        [worker("SERVING", pid=2, runner="process")],
    ) == ["decode-0 is back (process 2)"]


def test_one_that_serves_no_more_and_then_does() -> None:
    assert told(
        [worker("SERVING")], [worker("UNHEALTHY", reason="no step for 9 s")], [worker("SERVING")]
    ) == ["decode-0 does not serve: no step for 9 s", "decode-0 serves again"]


def test_those_that_come_and_go() -> None:
    first = worker("SERVING")
    assert told(
        [first],
        [first, worker("STARTING", pid=2, name="decode-1")],
        [first, worker("SERVING", pid=2, name="decode-1")],
        [first, worker("DRAINING", pid=2, name="decode-1")],
        [first],
        [first, worker("SERVING", pid=3, name="decode-1")],
    ) == [
        "decode-1 serves (process 2)",
        "decode-1 drains",
        "decode-1 has left",
        "decode-1 serves (process 3)",
    ]


def test_workers_that_cannot_be_looked_at_are_told_once_for_each_reason() -> None:
    news = FleetNews()
    seen = ListWorkersResponse(workers=[worker("SERVING")])
    assert news.unknown("no certificate") == ["no news of the workers: no certificate"]
    assert news.unknown("no certificate") == []
    assert news.unknown("no router") == ["no news of the workers: no router"]
    assert news.lines(seen) == []
    assert news.unknown("no router") == ["no news of the workers: no router"]


def test_a_silent_ray_is_told_once() -> None:
    same = [worker("SERVING")]
    lines = told(same, same, same, same, silent_ms=(0, 1000, 2000, 0))
    assert lines == [
        "Ray's control service does not answer: workers go on, but none is started",
        "Ray's control service answers again",
    ]


def test_a_router_or_a_pool_that_is_another_process_is_back() -> None:
    news = FleetNews()
    seen = ListWorkersResponse(workers=[worker("SERVING")])
    assert news.lines(seen, {"router-0": 10, "pool": 20}) == []
    # It does not answer, and then it does again: nobody has ended.
    assert news.lines(seen, {"pool": 20}) == []
    assert news.lines(seen, {"router-0": 10, "pool": 20}) == []
    assert news.lines(seen, {"pool": 21}) == ["pool is back (process 21)"]
    assert news.lines(seen, {"router-0": 11, "pool": 21}) == ["router-0 is back (process 11)"]
    assert news.lines(seen, {"router-0": 11, "pool": 21}) == []
