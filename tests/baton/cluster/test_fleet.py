"""Scale and drain over real child processes, trivial ones, and a pool and routers that the test plays."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.cluster import restart_policy
from baton.cluster.config import ClusterConfig
from baton.cluster.control import ControlClient
from baton.cluster.control_service import ControlService
from baton.cluster.fleet import Fleet
from baton.cluster.guard import Guard
from baton.cluster.pool_link import PoolLink
from baton.cluster.role_process import RoleProcess, RoleSpec
from baton.cluster.supervisor import Supervisor
from baton.errors import InvalidRequest, Unavailable
from baton.rpc import open_channel
from baton.v1 import common_pb2, pool_service_pb2
from baton.v1.admin_service_pb2 import GetClusterStatusResponse, PairState, WorkerStatus
from baton.v1.pool_service_pb2 import PoolWorker, ScaleResponse
from tests.baton.cluster.fake_pool import FakePool, serving

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
FOREVER = "import signal; signal.pause()"
FAILING = "raise SystemExit(1)"


class Routers:
    """One router that sees every process of the supervisor ready, unless told otherwise."""

    def __init__(self) -> None:
        self.supervisor: Supervisor | None = None
        self.unseen: set[str] = set()

    async def look(self) -> dict[str, GetClusterStatusResponse | None]:
        assert self.supervisor is not None
        workers = [
            WorkerStatus(
                name=name,
                pid=pid,
                state="ready",
                num_attempts=2,
                role=PREFILL if name.startswith("prefill") else DECODE,
                pairs=[PairState(worker="decode-0", transport="shm")],
            )
            for name, pid in self.supervisor.pids.items()
            if name not in self.unseen
        ]
        return {"router-0": GetClusterStatusResponse(workers=workers), "router-1": None}


class Rig:
    def __init__(
        self, fleet: Fleet, supervisor: Supervisor, routers: Routers, make_process: Callable[..., RoleProcess]
    ) -> None:
        self.fleet = fleet
        self.supervisor = supervisor
        self.routers = routers
        self.make_process = make_process

    @property
    def names(self) -> set[str]:
        return set(self.supervisor.names)


@asynccontextmanager
async def rig(
    tmp_path: Path, *names: str, pool: PoolLink | None = None, is_colocated: bool = False
) -> AsyncIterator[Rig]:
    routers = Routers()
    async with Guard() as guard:

        def process(role: str, index: int, script: str = FOREVER) -> RoleProcess:
            spec = RoleSpec(name=f"{role}-{index}", role=role, command=("-I", "-S", "-c", script))
            return RoleProcess(spec, tmp_path / spec.name, guard)

        processes = [process(name.partition("-")[0], int(name.partition("-")[2])) for name in names]
        supervisor = Supervisor(processes, report=lambda _: None, rng=random.Random(0))
        supervisor.is_settled = True
        routers.supervisor = supervisor
        fleet = Fleet(
            ClusterConfig(ray=pool is not None),
            supervisor=supervisor,
            views=routers,
            pool=pool,
            make_process=process,
            grace_s=5.0,
            is_colocated=is_colocated,
        )
        task = asyncio.create_task(supervisor.run())
        await until(lambda: len(supervisor.pids) == len(names))
        try:
            yield Rig(fleet, supervisor, routers, process)
        finally:
            await fleet.close()
            task.cancel()
            await asyncio.wait([task])
            await supervisor.stop([supervisor.names], grace_s=5.0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_scaling_up_takes_the_lowest_free_names(tmp_path: Path) -> None:
    async with rig(tmp_path, "decode-0", "decode-2", "prefill-0") as on:
        response = await on.fleet.scale(DECODE, 4)
        assert list(response.added) == ["decode-1", "decode-3"]
        assert not response.removed
        assert set(on.supervisor.pids) == {*(f"decode-{index}" for index in range(4)), "prefill-0"}
        assert on.fleet.names == on.names


async def test_scaling_down_drains_the_highest_names(tmp_path: Path) -> None:
    async with rig(tmp_path, "decode-0", "decode-1", "decode-10") as on:
        response = await on.fleet.scale(DECODE, 1)
        assert list(response.removed) == ["decode-10", "decode-1"]
        await until(lambda: on.names == {"decode-0"})
        assert on.fleet.names == {"decode-0"}


async def test_one_that_is_given_up_goes_first(tmp_path: Path) -> None:
    async with rig(tmp_path, "decode-0", "decode-1") as on:
        on.supervisor.life("decode-0").state = "failed"
        assert list((await on.fleet.scale(DECODE, 1)).removed) == ["decode-0"]


async def test_as_many_as_there_are_changes_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path, "prefill-0") as on:
        assert await on.fleet.scale(PREFILL, 1) == ScaleResponse()


async def give_up(on: Rig, name: str) -> None:
    """As the supervisor leaves a process that it has given up: dead, with nobody who keeps it."""
    await on.supervisor.remove(name, 5.0)
    await on.supervisor.add(on.make_process("decode", int(name.rpartition("-")[2]), FAILING))
    await until(lambda: on.supervisor.life(name).state == "failed")


async def test_those_that_were_given_up_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart_policy, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(restart_policy, "LONGEST_PAUSE_S", 0.02)
    async with rig(tmp_path, "decode-0", "decode-1") as on:
        await give_up(on, "decode-1")
        assert list((await on.fleet.scale(DECODE, 2)).added) == ["decode-1"]
        assert on.supervisor.life("decode-1").state == "running"
        assert set(on.supervisor.pids) == {"decode-0", "decode-1"}
        # Beside new ones, and with a full count of deaths.
        await give_up(on, "decode-0")
        assert list((await on.fleet.scale(DECODE, 3)).added) == ["decode-0", "decode-2"]
        assert set(on.supervisor.pids) == {"decode-0", "decode-1", "decode-2"}


async def test_a_fleet_that_is_closed_changes_no_more(tmp_path: Path) -> None:
    async with rig(tmp_path, "decode-0", "decode-1") as on:
        scaling = asyncio.create_task(on.fleet.scale(DECODE, 3))
        await asyncio.sleep(0)
        await on.fleet.close()
        # What had begun is over, so that whoever stops the supervisor stops all of it.
        assert scaling.done()
        assert "decode-2" in on.supervisor.pids
        with pytest.raises(Unavailable, match="this cluster ends"):
            await on.fleet.scale(DECODE, 4)
        with pytest.raises(Unavailable, match="this cluster ends"):
            await on.fleet.drain("decode-0", dry_run=False, force=False)
        assert on.fleet.names == {"decode-0", "decode-1", "decode-2"}


@pytest.mark.parametrize("number", [0, 65])
async def test_a_number_out_of_range_is_refused(tmp_path: Path, number: int) -> None:
    async with rig(tmp_path, "decode-0") as on:
        with pytest.raises(InvalidRequest, match="1 to 64") as caught:
            await on.fleet.scale(DECODE, number)
        assert caught.value.field == "num_workers"


@pytest.mark.parametrize("role", [common_pb2.ROLE_ROUTER, common_pb2.ROLE_UNSPECIFIED])
async def test_other_roles_are_refused(tmp_path: Path, role: common_pb2.Role.ValueType) -> None:
    async with rig(tmp_path, "decode-0") as on:
        with pytest.raises(InvalidRequest, match="prefill or decode") as caught:
            await on.fleet.scale(role, 2)
        assert caught.value.field == "role"


async def test_a_colocated_cluster_takes_no_prefill_workers(tmp_path: Path) -> None:
    async with rig(tmp_path, "decode-0", is_colocated=True) as on:
        with pytest.raises(InvalidRequest, match="colocated"):
            await on.fleet.scale(PREFILL, 1)
        assert list((await on.fleet.scale(DECODE, 2)).added) == ["decode-1"]


async def test_a_drained_worker_leaves_for_good(tmp_path: Path) -> None:
    async with rig(tmp_path, "decode-0", "decode-1") as on:
        pid = on.supervisor.pids["decode-0"]
        response = await on.fleet.drain("decode-0", dry_run=False, force=False)
        assert (response.worker.name, response.worker.pid, response.worker.num_attempts) == (
            "decode-0",
            pid,
            2,
        )
        assert (response.num_others, response.grace_ms) == (1, 5000)
        await until(lambda: on.names == {"decode-1"})
        # Its name is free again.
        assert list((await on.fleet.scale(DECODE, 2)).added) == ["decode-0"]


async def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path, "decode-0") as on:
        response = await on.fleet.drain("decode-0", dry_run=True, force=False)
        assert (response.num_others, on.supervisor.life("decode-0").state) == (0, "running")


async def test_the_last_that_serves_needs_force(tmp_path: Path) -> None:
    async with rig(tmp_path, "decode-0", "decode-1", "prefill-0") as on:
        # Another one that lives, but serves nobody, does not count.
        on.routers.unseen.add("decode-1")
        with pytest.raises(InvalidRequest, match="no other decode worker serves") as caught:
            await on.fleet.drain("decode-0", dry_run=False, force=False)
        assert caught.value.field == "force"
        assert on.supervisor.life("decode-0").state == "running"
        await on.fleet.drain("decode-0", dry_run=False, force=True)
        await until(lambda: on.names == {"decode-1", "prefill-0"})


async def test_one_that_is_given_up_may_go_as_the_last(tmp_path: Path) -> None:
    async with rig(tmp_path, "decode-0", "prefill-0") as on:
        on.supervisor.life("decode-0").state = "failed"
        told = await on.fleet.drain("decode-0", dry_run=False, force=False)
        assert told.num_others == 0
        await until(lambda: "decode-0" not in on.names)
        assert on.names == {"prefill-0"}


async def test_one_that_is_leaving_cannot_be_drained_again(tmp_path: Path) -> None:
    async with rig(tmp_path, "decode-0", "decode-1") as on:
        on.supervisor.life("decode-1").state = "draining"
        with pytest.raises(InvalidRequest, match="leaving already"):
            await on.fleet.drain("decode-1", dry_run=False, force=False)


async def test_an_unknown_name_is_refused_with_those_there_are(tmp_path: Path) -> None:
    async with rig(tmp_path, "decode-0", "prefill-0") as on:
        with pytest.raises(InvalidRequest, match="'decode-7'; there are decode-0, prefill-0") as caught:
            await on.fleet.drain("decode-7", dry_run=True, force=False)
        assert caught.value.field == "name"


async def test_rays_workers_are_the_pools_and_the_others_are_not(tmp_path: Path) -> None:
    actor = PoolWorker(
        name="decode-3", role=DECODE, state=pool_service_pb2.POOL_WORKER_STATE_SERVING, runner="ray"
    )
    ready_file = tmp_path / "pool.json"
    link = PoolLink(ready_file, lambda: 1, {"decode": 1}, open_channel, keep=lambda _: None)
    async with (
        serving(FakePool(actor), ready_file) as pool,
        rig(tmp_path, "prefill-0", "prefill-1", pool=link) as on,
    ):
        listed = await on.fleet.list_workers()
        assert [(worker.name, worker.runner) for worker in listed.workers] == [
            ("decode-3", "ray"),
            ("prefill-0", "process"),
            ("prefill-1", "process"),
        ]
        assert listed.dashboard_url == "http://ray"
        assert on.fleet.names == {"decode-3", "prefill-0", "prefill-1"}
        assert list((await on.fleet.scale(DECODE, 2)).added) == ["decode-9"]
        assert (await on.fleet.drain("decode-3", dry_run=True, force=True)).num_others == 4
        assert pool.asked == [("scale", DECODE, 2), ("drain", "decode-3", True, True)]
        # What answers, and is no process of this cluster, has no process id.
        assert on.fleet.answering == {}
        await on.fleet.drain("prefill-1", dry_run=False, force=False)
        await until(lambda: on.names == {"prefill-0"})


async def test_all_of_it_can_be_asked_over_the_control_port(tmp_path: Path) -> None:
    async with (
        rig(tmp_path, "decode-0", "decode-1") as on,
        await ControlService.serve(on.fleet, port=0) as server,
        ControlClient(server.address) as control,
    ):
        listed = await control.list_workers()
        assert [worker.name for worker in listed.workers] == ["decode-0", "decode-1"]
        assert (await control.drain("decode-1", dry_run=True)).num_others == 1
        with pytest.raises(InvalidRequest, match="no worker 'x'") as caught:
            await control.drain("x")
        assert caught.value.field == "name"
        assert list((await control.scale(DECODE, 1)).removed) == ["decode-1"]


async def test_the_routers_that_answered_are_known_with_their_processes(tmp_path: Path) -> None:
    async with rig(tmp_path, "router-0", "router-1", "decode-0") as on:
        assert on.fleet.answering == {}
        await on.fleet.list_workers()
        # The other one does not answer.
        assert on.fleet.answering == {"router-0": on.supervisor.pids["router-0"]}
