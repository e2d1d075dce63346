"""The cluster, as its router sees it: who serves, who does not fit to the others, whose weights they have.

Workers compare fingerprints with their peers themselves and refuse those that differ; what is looked at here
is what they have said.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from baton.client import AsyncClient
from baton.cluster.status import fetch_status
from baton.doctor.check import Check, ok, problem, warning
from baton.errors import BatonError, Unauthenticated, Unavailable
from baton.model_shelf import pulled_models
from baton.models import ModelDir
from baton.readiness import is_ready
from baton.rpc import OpenChannel
from baton.v1.admin_service_pb2 import GetClusterStatusResponse

_PATIENCE_S = 3.0
_MISFIT = "INCOMPATIBLE_PEER"


async def find(
    address: str, opener: OpenChannel, *, is_expected: bool
) -> tuple[GetClusterStatusResponse | None, Check]:
    """The cluster of the router with this admin port, if one answers.

    is_expected: the user named it, so something should answer there.
    """
    try:
        status = await fetch_status(address, timeout_s=_PATIENCE_S, opener=opener)
    except Unavailable as error:
        if is_expected or error.field:
            found = problem("router", error.message, "start it, or name its admin port with --address")
        else:
            found = ok("router", f"none answers at {address}: no cluster to look at")
        return None, found
    what = f"{status.router} serves {status.model}, {status.num_requests} requests in flight"
    return status, ok("router", what)


def cluster(status: GetClusterStatusResponse) -> Iterator[Check]:
    """What the router says of its workers."""
    yield from workers(status)
    yield fingerprints(status)


def workers(status: GetClusterStatusResponse) -> Iterator[Check]:
    """Whether there are any to use, and what is wrong with the others."""
    able = [worker.name for worker in status.workers if worker.state == "ready"]
    if able:
        yield ok("workers", f"ready: {', '.join(able)}")
    else:
        yield problem(
            "workers", "none is ready", "`baton workers` says how far each one is; their logs say why"
        )
    for worker in status.workers:
        if worker.state in ("lost", "draining", "connecting"):
            found = f"{worker.state}: {worker.reason}" if worker.reason else worker.state
            yield warning(worker.name, found, "its log says why; `baton workers` says if it comes back")
        elif worker.state == "ready" and worker.reason:
            yield warning(worker.name, worker.reason, "docs/operations.md says what that means")


def fingerprints(status: GetClusterStatusResponse) -> Check:
    """Whether all processes have the same model and speak of the same things."""
    misfits = [f"{w.name}: {w.reason}" for w in status.workers if w.state == "refused"]
    misfits += [
        f"{worker.name} and {pair.worker}: {pair.reason}"
        for worker in status.workers
        for pair in worker.pairs
        if pair.code == _MISFIT
    ]
    if misfits:
        return problem(
            "fingerprints",
            "; ".join(misfits),
            "give all of them the same model folder and settings; a worker that is refused is not used",
        )
    return ok("fingerprints", f"{len(status.workers)} workers agree with the router and each other")


async def public_port(address: str, opener: OpenChannel, client: AsyncClient) -> AsyncIterator[Check]:
    """Whether requests would be taken, and whether this machine has the weights that answer them."""
    try:
        if await is_ready(address, opener, timeout_s=_PATIENCE_S):
            yield ok("public port", f"{address} takes requests")
        else:
            yield warning("public port", f"{address} does not take requests yet", "baton ready --wait 60")
        yield await _weights(client)
    except Unauthenticated as error:
        yield warning("public port", error.message, "give an API key with BATON_API_KEY")
    except BatonError as error:
        yield warning("public port", error.message, "name it with BATON_ADDRESS")


async def _weights(client: AsyncClient) -> Check:
    served = await client.list_models(timeout_s=_PATIENCE_S)
    ids = {model.name.rpartition("/")[2]: model.weights_id for model in served}
    for model in pulled_models():
        weights_id = ids.get(model.path.name)
        if weights_id is None or model.problem:
            continue
        known = known_weights_id(ModelDir.open(model.path))
        if known is not None and known != weights_id:
            return warning(
                "model folder",
                f"{model.path} has weights {known[:12]}, the cluster serves {weights_id[:12]}",
                "pull it again before workers are started from it; they would be refused",
            )
        if known is not None:
            return ok("model folder", f"{model.path} has the weights that the cluster serves")
    return ok("model folder", f"{', '.join(ids)} is not pulled on this machine")


def known_weights_id(model: ModelDir) -> str | None:
    """What the pull recorded; None where that would have to be computed from all weights."""
    manifest = model.manifest
    return manifest.weights_id if manifest and manifest.describes(model.weights_files) else None
