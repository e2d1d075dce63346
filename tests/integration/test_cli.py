"""The command line against a whole cluster: both doors under load, readiness, and the doctor."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass

import pytest

from baton import AsyncClient
from baton.cluster.local_cluster import LocalCluster
from baton.doctor import cluster_check
from baton.rpc import open_channel

pytestmark = pytest.mark.asyncio(loop_scope="session")

WITHIN_S = 60.0


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


async def baton(*arguments: str) -> Ran:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "baton.cli.main", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(WITHIN_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return Ran(process.returncode, out.decode(), err.decode())


async def test_both_doors_bear_load_and_count_alike(tiny_cluster: LocalCluster) -> None:
    load = ["--requests", "12", "--concurrency", "3", "--warm-up", "1", "--slo", "ttft=60s,e2e=60s"]
    load += [
        "--input-tokens",
        "50:8,50:40-80",
        "--output-tokens",
        "6",
        "--token-ids",
        "100-250",
        "--json",
        "-",
    ]
    doors = {
        "grpc": ["--address", tiny_cluster.address],
        "http": ["--door", "http", "--url", tiny_cluster.http_urls[0]],
    }
    for name, door in doors.items():
        ran = await baton("bench", *door, *load)
        assert ran.code == 0, ran.err
        found = json.loads(ran.out)
        figures = found["figures"]
        assert (found["settings"]["door"], found["model"]) == (name, "tiny")
        assert (figures["num_complete"], figures["num_met"], figures["errors"]) == (12, 12, {})
        # Six tokens of each, however they were packed on the way.
        assert figures["output_tokens_per_s"] == pytest.approx(6 * figures["requests_per_s"])
        assert 0 < figures["ttft_ms"]["p50"] < figures["e2e_ms"]["p50"]


async def test_an_open_loop_reports_what_is_refused_by_its_code(tiny_cluster: LocalCluster) -> None:
    # No prompt of the tiny model can be this long.
    load = ["--rate", "50", "--requests", "3", "--warm-up", "0", "--input-tokens", "100000", "--json", "-"]
    ran = await baton("bench", "--address", tiny_cluster.address, *load)
    assert ran.code == 1
    assert json.loads(ran.out)["figures"]["errors"] == {"CONTEXT_LENGTH_EXCEEDED": 3}


async def test_a_cluster_that_serves_is_ready(tiny_cluster: LocalCluster) -> None:
    ran = await baton("ready", "--address", tiny_cluster.address)
    assert (ran.code, ran.out) == (0, "ready\n")


async def test_the_doctor_finds_a_cluster_well(tiny_cluster: LocalCluster, tiny_client: AsyncClient) -> None:
    # Its parts: the whole would load torch.
    status, router = await cluster_check.find(tiny_cluster.admin_address, open_channel, is_expected=True)
    assert status is not None
    found = [router, *cluster_check.cluster(status)]
    found += [c async for c in cluster_check.public_port(tiny_cluster.address, open_channel, tiny_client)]

    assert [(check.name, check.state) for check in found] == [
        ("router", "ok"),
        ("workers", "ok"),
        ("fingerprints", "ok"),
        ("public port", "ok"),
        ("model folder", "ok"),
    ]
    assert found[1].found == "ready: decode-0, prefill-0"
    assert found[2].found == "2 workers agree with the router and each other"
    assert found[3].found == f"{tiny_cluster.address} takes requests"
