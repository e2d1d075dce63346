"""`baton doctor` as a whole, and what it says of a cluster."""

from __future__ import annotations

import json

import pytest

from baton.doctor import cluster_check, devices
from baton.errors import Unauthenticated
from baton.v1.admin_service_pb2 import GetClusterStatusResponse, PairState, WorkerStatus


@pytest.fixture(autouse=True)
def _no_torch(monkeypatch):
    """Loading it takes seconds; tests/baton/doctor/test_devices.py does so once."""
    monkeypatch.setattr(devices.checks, "__defaults__", (dict, devices.checks.__defaults__[1]))


@pytest.fixture(autouse=True)
def free_ports(monkeypatch):
    """So that whatever runs on this machine is out of the picture."""
    for name in ("PORT", "HTTP_PORT", "ADMIN_PORT", "CONTROL_PORT", "DASHBOARD_PORT"):
        monkeypatch.setenv(f"BATON_CLUSTER_{name}", "0")


def checks(ran) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in json.loads(ran.out)["checks"]}


def test_it_works_with_nothing_running(baton, monkeypatch) -> None:
    monkeypatch.setattr("baton.cli.doctor.DEFAULT_ADMIN_ADDRESS", "127.0.0.1:1")
    ran = baton("doctor", "--json")
    found = checks(ran)
    assert ran.code == 0
    assert {
        "cores",
        "memory",
        "open files",
        "python",
        "grpcio",
        "devices",
        "models",
        "redis server",
        "router",
    } <= set(found)
    assert found["router"]["found"] == "none answers at 127.0.0.1:1: no cluster to look at"
    assert all(bool(check["remedy"]) == (check["state"] != "ok") for check in found.values())


def test_people_get_a_line_per_check_and_a_remedy(baton, router, monkeypatch) -> None:
    monkeypatch.setenv("BATON_ADDRESS", router.address)
    ran = baton("doctor", "--address", router.address)
    assert ran.code == 1
    lines = ran.out.splitlines()
    at = lines.index("problem  workers: none is ready")
    assert lines[at + 1].startswith("         -> `baton workers` says how far")
    assert lines[-1].endswith(", 1 problem")


def test_a_named_router_that_does_not_answer_is_a_problem(baton) -> None:
    ran = baton("doctor", "--json", "--address", "127.0.0.1:1")
    assert (ran.code, checks(ran)["router"]["state"]) == (1, "problem")


def test_a_wrong_setting_is_a_problem_and_the_rest_is_looked_at(baton, monkeypatch) -> None:
    monkeypatch.setenv("BATON_CLUSTER_PROT", "1")
    monkeypatch.setattr("baton.cli.doctor.DEFAULT_ADMIN_ADDRESS", "127.0.0.1:1")
    ran = baton("doctor", "--json")
    found = checks(ran)
    assert (ran.code, found["settings"]["state"]) == (1, "problem")
    assert "BATON_CLUSTER_PROT is unknown" in found["settings"]["found"]
    assert "router" in found


def test_a_running_cluster_is_looked_at(baton, router, monkeypatch) -> None:
    router.status = GetClusterStatusResponse(
        router="router-0", model="tiny", workers=[WorkerStatus(name="decode-0", state="ready")]
    )
    monkeypatch.setenv("BATON_ADDRESS", router.address)
    found = checks(baton("doctor", "--json", "--address", router.address))
    assert found["router"]["found"] == "router-0 serves tiny, 0 requests in flight"
    assert found["workers"]["found"] == "ready: decode-0"
    assert found["fingerprints"]["state"] == "ok"
    # This router has no service of health.
    assert found["public port"]["state"] == "warning"


class Locked:
    """The client of somebody without a key."""

    async def list_models(self, *, timeout_s: float) -> None:
        raise Unauthenticated("this cluster wants an API key")


async def test_a_router_that_wants_a_key_is_not_somewhere_else(monkeypatch) -> None:
    async def takes_requests(*_given, **_more) -> bool:
        return True

    monkeypatch.setattr(cluster_check, "is_ready", takes_requests)
    port, locked = [check async for check in cluster_check.public_port("a:1", None, Locked())]
    assert port.state == "ok"
    assert (locked.state, locked.found) == ("warning", "this cluster wants an API key")
    assert locked.remedy == "give an API key with BATON_API_KEY"


def status(*workers: WorkerStatus) -> GetClusterStatusResponse:
    return GetClusterStatusResponse(router="router-0", model="tiny", workers=workers)


def test_workers_that_do_not_fit_are_a_problem() -> None:
    found = cluster_check.fingerprints(
        status(
            WorkerStatus(name="decode-0", state="refused", reason="weights_id differs"),
            WorkerStatus(
                name="prefill-0",
                state="ready",
                pairs=[
                    PairState(worker="decode-1", code="INCOMPATIBLE_PEER", reason="block_size 16, not 32"),
                    PairState(worker="decode-2", code="PEER_LOST", reason="reset"),
                ],
            ),
        )
    )
    assert found.state == "problem"
    assert found.found == "decode-0: weights_id differs; prefill-0 and decode-1: block_size 16, not 32"


def test_a_worker_that_is_away_is_a_warning() -> None:
    found = {
        check.name: check
        for check in cluster_check.workers(
            status(
                WorkerStatus(name="decode-0", state="ready"),
                WorkerStatus(name="decode-1", state="lost", reason="reset"),
                WorkerStatus(name="decode-2", state="ready", reason="its disk is full"),
            )
        )
    }
    assert found["workers"].state == "ok"
    assert (found["decode-1"].state, found["decode-1"].found) == ("warning", "lost: reset")
    assert (found["decode-2"].state, found["decode-2"].found) == ("warning", "its disk is full")
