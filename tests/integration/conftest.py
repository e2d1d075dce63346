"""Clusters that the integration tests share: each starts once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from transformers import LlamaForCausalLM

from baton import AsyncClient
from baton.cluster.config import ClusterConfig
from baton.cluster.local_cluster import LocalCluster
from baton.models import ModelDir
from baton.pull import pull
from benchmarks.tiny_llama import write_tiny_model

REAL_MODEL = "smollm2-135m-instruct"
PORTS = ("port", "http_port", "admin_port", "control_port", "dashboard_port")
ANY_PORTS = {**dict.fromkeys(PORTS, 0), "drain_s": 1.0}


@pytest.fixture(scope="session")
def real_model() -> ModelDir:
    """SmolLM2-135M-Instruct, pulled if it is not there."""
    return pull(REAL_MODEL, lambda *_: None).model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    """A tiny random model: its folder, and transformers' own."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return folder, write_tiny_model(folder)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def real_cluster(real_model: ModelDir) -> AsyncIterator[LocalCluster]:
    """The real model in fp32: router, one prefill worker for all prompts, one decode worker on Ray."""
    config = ClusterConfig(
        model=str(real_model.path), dtype="float32", placement="disaggregated", **ANY_PORTS
    )
    with pytest.MonkeyPatch.context() as environment:
        # So that a dead worker's requests fail before it is back, which test_death.py looks at.
        environment.setenv("BATON_ROUTER_RESUME_WAIT_S", "1")
        cluster = await LocalCluster.start(config)
    async with cluster:
        yield cluster


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tiny_cluster(
    tiny_model: tuple[Path, LlamaForCausalLM], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalCluster]:
    """The tiny model in fp32, a prefill worker for all prompts, plain processes, tracing to a file."""
    config = ClusterConfig(
        model=str(tiny_model[0]),
        dtype="float32",
        placement="disaggregated",
        kv_cache_bytes=16 << 20,
        ray=False,
        trace_file=str(tmp_path_factory.mktemp("traces") / "spans.jsonl"),
        **ANY_PORTS,
    )
    async with await LocalCluster.start(config) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="session")
async def real_client(real_cluster: LocalCluster) -> AsyncIterator[AsyncClient]:
    """A client of the real cluster."""
    async with await AsyncClient.connect(real_cluster.address) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="session")
async def tiny_client(tiny_cluster: LocalCluster) -> AsyncIterator[AsyncClient]:
    """A client of the tiny cluster."""
    async with await AsyncClient.connect(tiny_cluster.address) as client:
        yield client
