"""Ray, as a pool uses it: places, named actors, nodes. The one module that starts Ray.

Every call that waits for Ray's control service runs on one thread. Tokens and KV never pass through Ray.

Import it after prepare_environment(): Ray reads its environment once.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import GetTimeoutError, RayError
from ray.util import list_named_actors
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from baton.errors import Unavailable
from baton.logs import get_logger
from baton.pool.config import MAX_SLOTS, ROLES, PoolConfig, slot
from baton.pool.gcs_watch import GcsWatch
from baton.pool.placing import Ask, Node, Target
from baton.pool.pool_claim import owner_of, stake
from baton.pool.ray_worker import RayWorker
from baton.pool.runtime import FoundWorker, Place, WorkerHandle, WorkerLost, WorkerSpec
from baton.process import unless_stopped
from baton.rpc import OpenChannel
from baton.tls import TlsFiles

LOOPBACK: Final = "127.0.0.1"
# Tokens and KV never pass through Ray's object store; this is the least it accepts.
OBJECT_STORE_BYTES: Final = 80 * 1024 * 1024
# One call waits for the actor's end, as may one of a pool that is gone; the others must not wait behind.
ACTOR_THREADS: Final = 4
# Ray frees an actor's name some moments after its end.
NAME_FREE_S: Final = 10.0
# A worker of an earlier pool that does not say who it is in this time is replaced.
FIND_WITHIN_S: Final = 15.0
# How long something has to listen at the address of a Ray that is joined, and between two looks.
JOIN_S: Final = 60.0
JOIN_PAUSE_S: Final = 0.5
# Without its control service Ray cannot shut down in order.
SHUTDOWN_WITHIN_S: Final = 15.0

ResultT = TypeVar("ResultT")

log = get_logger(__name__)


class RayRuntime:
    """A Ray that was started or joined. Made by `await RayRuntime.start(config)`; end it with close()."""

    def __init__(
        self, config: PoolConfig, thread: ThreadPoolExecutor, dashboard_url: str, gcs: GcsWatch
    ) -> None:
        self.dashboard_url = dashboard_url
        self._config = config
        self._thread = thread
        self._gcs = gcs
        self._claim: Any = None
        self._node_id = ray.get_runtime_context().get_node_id()
        self._watching = asyncio.create_task(gcs.run(), name="ray control service")

    @classmethod
    async def start(cls, config: PoolConfig) -> Self:
        """Starts a local Ray, or joins the one at ray_address; raises Unavailable if that does not answer."""
        # The kernel ends Ray's processes with the thread that started them, so this one must live as long.
        thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        loop = asyncio.get_running_loop()
        dashboard_url = await loop.run_in_executor(thread, _connect, config)
        address = ray.get_runtime_context().gcs_address
        gcs = GcsWatch(address, _gcs_opener(), is_ours=not config.ray_address)
        return cls(config, thread, dashboard_url, gcs)

    @property
    def silent_s(self) -> float:
        """How long Ray's control service has not answered, in seconds; 0 while it answers."""
        return self._gcs.silent_s

    @property
    def is_gone(self) -> bool:
        """Whether it has ended for good."""
        return self._gcs.gone.is_set()

    async def until_answering(self) -> None:
        """Returns once it answers."""
        await self._gcs.until_answering()

    async def claim(self) -> None:
        """Makes sure that no other pool keeps the same workers; raises Unavailable if one does."""
        namespace = self._config.namespace
        if not self._config.ray_address:
            return
        try:
            self._claim = await self._once_free(lambda: stake(namespace))
        except ValueError:
            owner = await self._call(lambda: owner_of(namespace))
            raise Unavailable(
                f"namespace {namespace} of this Ray cluster has a pool already: {owner}; end that first, or "
                "choose another namespace (a Deployment of a pool needs strategy: Recreate)"
            ) from None

    async def watch(self) -> None:
        """Runs until cancelled; raises what nobody else would see, a defect of the watch over Ray."""
        await asyncio.shield(self._watching)

    async def nodes(self) -> Sequence[Node]:
        """The living nodes, by address."""
        return await self._call(_nodes)

    async def reserve(self, name: str, ask: Ask, target: Target) -> str:
        """A placement group of one bundle, which may wait for its room."""
        group_name = self._group_name(name)

        def reserve() -> str:
            # One that Ray made although it had lost patience.
            _remove_groups(re.compile(re.escape(group_name)), set())
            group = placement_group(
                [dict(ask.resources)],
                strategy="STRICT_PACK",
                name=group_name,
                lifetime="detached" if self._config.ray_address else None,
                bundle_label_selector=[target.selector(ask.labels)],
            )
            return str(group.id.hex())

        return await self._call(reserve)

    async def node_of(self, group: str) -> str | None:
        """The node of the group's bundle, once it is reserved."""

        def look() -> str | None:
            row = placement_group_table(_group(group))
            return str(row["bundles_to_node_id"][0]) if row.get("state") == "CREATED" else None

        return await self._call(look)

    async def free(self, group: str) -> None:
        """Removes the group."""
        await self._call(lambda: remove_placement_group(_group(group)))

    async def start_worker(self, spec: WorkerSpec, place: Place) -> WorkerHandle:
        """Starts a named actor in its group."""
        try:
            actor = await self._once_free(lambda: self._create(spec, place))
        except ValueError as error:
            raise WorkerLost(f"Ray cannot start it: {error}") from None
        return RayWorker(actor, self._node_id)

    async def kill(self, handle: WorkerHandle) -> None:
        """Ends an actor, and its process at once if that runs on this node."""
        assert isinstance(handle, RayWorker), "a pool gets its handles from here"
        handle.kill_process()
        await self._call(lambda: ray.kill(handle.actor))

    async def find(self, role: str) -> Sequence[FoundWorker]:
        """The detached actors of an earlier pool; groups that belong to none of them are removed."""
        if not self._config.ray_address:
            return []
        pattern = re.compile(rf"{role}-\d+")
        rows = await self._call(lambda: list_named_actors(all_namespaces=True))
        names = [row["name"] for row in rows if row["namespace"] == self._config.namespace]
        looks = [self._find_one(name) for name in names if pattern.fullmatch(name)]
        found = [worker for worker in await asyncio.gather(*looks) if worker is not None]
        kept = {worker.facts.place.group for worker in found}
        names_of_groups = re.compile(re.escape(self._group_name("")) + pattern.pattern)
        await self._call(lambda: _remove_groups(names_of_groups, kept))
        return found

    async def close(self) -> bool:
        """Leaves Ray, and ends a local one; false if Ray hangs, and only the end of this process will do."""
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        if self.is_gone:
            return False
        try:
            async with asyncio.timeout(SHUTDOWN_WITHIN_S):
                await asyncio.get_running_loop().run_in_executor(self._thread, ray.shutdown)
        except TimeoutError:
            return False
        self._thread.shutdown(wait=False)
        return True

    async def _find_one(self, name: str) -> FoundWorker | None:
        try:
            actor = await self._call(lambda: ray.get_actor(name, namespace=self._config.namespace))
        except ValueError:
            return None
        handle = RayWorker(actor, self._node_id)
        try:
            async with asyncio.timeout(FIND_WITHIN_S):
                return FoundWorker(handle=handle, facts=await handle.facts())
        except (TimeoutError, WorkerLost):
            log.warning("worker of an earlier pool does not answer", worker=name)
            await self.kill(handle)
            return None

    async def _once_free(self, create: Callable[[], ResultT]) -> ResultT:
        """Creates a named actor; raises ValueError if Ray does not free the name within NAME_FREE_S."""
        deadline_s = asyncio.get_running_loop().time() + NAME_FREE_S
        while True:
            try:
                return await self._call(create)
            except ValueError:
                if asyncio.get_running_loop().time() >= deadline_s:
                    raise
            await asyncio.sleep(0.1)

    def _create(self, spec: WorkerSpec, place: Place) -> Any:
        amounts = dict(spec.ask.resources)
        options = ray.remote(spec.actor_class).options(
            name=spec.name,
            namespace=self._config.namespace,
            lifetime="detached" if self._config.ray_address else None,
            num_cpus=amounts.pop("CPU", 0.0),
            num_gpus=amounts.pop("GPU", 0.0),
            memory=amounts.pop("memory", None),
            resources=amounts,
            # Ray would start it again at once, and again; the pool pauses between deaths.
            max_restarts=0,
            max_concurrency=ACTOR_THREADS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                _group(place.group), placement_group_bundle_index=0
            ),
        )
        plain_place = {"group": place.group, "node_id": place.node_id, "address": place.address}
        return options.remote(dict(spec.settings), spec.digest, plain_place)

    def _group_name(self, name: str) -> str:
        return f"{self._config.namespace}/{name}"

    async def _call(self, work: Callable[[], ResultT]) -> ResultT:
        """Runs what waits for Ray's control service, again if Ray has lost patience with it.

        Raises WorkerLost if the control service has ended.
        """
        while True:
            if self.is_gone:
                raise WorkerLost("Ray's control service has ended")
            working = asyncio.get_running_loop().run_in_executor(self._thread, work)
            gone = asyncio.ensure_future(self._gcs.gone.wait())
            try:
                await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    return working.result()
            except GetTimeoutError:
                log.warning("ray gave up waiting for its control service")
            finally:
                gone.cancel()
            await unless_stopped(self._gcs.gone, self.until_answering())


def _connect(config: PoolConfig) -> str:
    """Joins or starts Ray; returns the dashboard's URL, or "" if there is none."""
    if config.ray_address:
        context = _join(config)
    else:
        context = ray.init(
            address="local",
            namespace=config.namespace,
            num_cpus=os.cpu_count(),
            resources={slot(role): MAX_SLOTS for role in ROLES},
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=True,
            dashboard_host=config.dashboard_host,
            dashboard_port=config.dashboard_port,
            _node_ip_address=LOOPBACK,
            _temp_dir=config.ray_dir or None,
            log_to_driver=False,
            configure_logging=False,
        )
    _protect_token()
    url = context.dashboard_url
    return f"http://{url}" if url else ""


def _protect_token() -> None:
    """Ray makes its token readable for everybody, and whoever has it can run code on the cluster."""
    token = Path.home() / ".ray" / "auth_token"
    if token.is_file() and token.stat().st_uid == os.getuid():
        token.chmod(0o600)


def _join(config: PoolConfig) -> Any:
    _wait_for_port(config.ray_address)
    try:
        return ray.init(address=config.ray_address, namespace=config.namespace, log_to_driver=False)
    except (ConnectionError, RayError) as error:
        raise Unavailable(
            f"no Ray cluster answers at {config.ray_address}: {error} (a token goes into RAY_AUTH_TOKEN)"
        ) from None


def _wait_for_port(address: str) -> None:
    """Ray itself would ask for ever. Raises Unavailable if nothing listens there within JOIN_S."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        # "auto", and what else Ray may know.
        return
    log.info("the pool waits for Ray", address=address)
    until = time.monotonic() + JOIN_S
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=JOIN_S).close()
        except OSError as error:
            if time.monotonic() > until:
                raise Unavailable(
                    f"no Ray cluster answers at {address}: {error}; start one, or name its control service "
                    "in ray_address"
                ) from None
            time.sleep(JOIN_PAUSE_S)
        else:
            return


def _gcs_opener() -> OpenChannel:
    """As Ray's own processes dial it: its files of TLS come from its own variables."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return TlsFiles().opener()
    names = {"cert": "RAY_TLS_SERVER_CERT", "key": "RAY_TLS_SERVER_KEY", "ca": "RAY_TLS_CA_CERT"}
    return TlsFiles(**{key: os.environ.get(name, "") for key, name in names.items()}).opener()


def _nodes() -> list[Node]:
    free = available_resources_per_node()
    nodes = [
        Node(
            node_id=row["NodeID"],
            address=row["NodeManagerAddress"],
            labels=row.get("Labels") or {},
            free=free.get(row["NodeID"], {}),
            total=row["Resources"],
        )
        for row in ray.nodes()
        if row["Alive"]
    ]
    return sorted(nodes, key=lambda node: (node.address, node.node_id))


def _group(group: str) -> PlacementGroup:
    return PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group)))


def _remove_groups(pattern: re.Pattern[str], kept: set[str]) -> None:
    for group, row in placement_group_table().items():
        if pattern.fullmatch(row["name"]) and row["state"] != "REMOVED" and group not in kept:
            remove_placement_group(_group(group))
