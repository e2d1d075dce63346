"""What an operator sees: `baton status`, health, reflection, and the Ray dashboard."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.cluster.local_cluster import LocalCluster
from baton.rpc import open_channel


async def run_cli(*arguments: str) -> str:
    """Standard output of a baton command that must succeed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "baton.cli.main", *arguments, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


@pytest.mark.asyncio(loop_scope="session")
async def test_status_shows_workers_buckets_and_blocks(real_cluster: LocalCluster) -> None:
    output = await run_cli("status", "--address", real_cluster.admin_address, "--json")
    status: dict[str, Any] = json.loads(output)
    workers = {worker["name"]: worker for worker in status["workers"]}
    assert {name: worker["role"] for name, worker in workers.items()} == {
        "prefill-0": "prefill",
        "decode-0": "decode",
    }
    for worker in workers.values():
        assert worker["state"] == "ready"
        assert 0 < worker["num_free_blocks"] <= worker["num_blocks"]
    assert [bucket["label"] for bucket in status["buckets"]] == ["<128", "128-255", "256-511", ">=512"]
    assert all(bucket["num_waiting"] == 0 for bucket in status["buckets"])


@pytest.mark.asyncio(loop_scope="session")
async def test_the_dashboard_lists_the_decode_actor_by_name(real_cluster: LocalCluster) -> None:
    actors = await asyncio.to_thread(_actors, real_cluster)
    alive = [(actor["name"], actor["class_name"]) for actor in actors if actor["state"] == "ALIVE"]
    assert alive == [("decode-0", "DecodeWorker")]


@pytest.mark.asyncio(loop_scope="session")
async def test_health_and_reflection(real_cluster: LocalCluster) -> None:
    async with open_channel(real_cluster.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="baton.v1.InferenceService"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await reflection.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = (await reflection.read()).list_services_response.service
        reflection.cancel()
        assert "baton.v1.InferenceService" in {service.name for service in listed}
        assert "baton.v1.AdminService" not in {service.name for service in listed}


def _actors(cluster: LocalCluster) -> list[dict[str, Any]]:
    import urllib.request

    # Where Ray keeps the token that it makes when there is none.
    token = (Path.home() / ".ray" / "auth_token").read_text().strip()
    request = urllib.request.Request(f"{cluster.dashboard_url}/api/v0/actors")
    request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=10) as response:
        actors: list[dict[str, Any]] = json.load(response)["data"]["result"]["result"]
        return actors
