"""The acceptance question, through the command line, on the real model in bf16."""

from __future__ import annotations

import pytest

from baton.cluster.config import ClusterConfig
from baton.cluster.local_cluster import LocalCluster
from baton.models import ModelDir
from tests.integration.conftest import ANY_PORTS
from tests.integration.test_status import run_cli


@pytest.mark.asyncio(loop_scope="session")
async def test_the_capital_of_france(real_model: ModelDir) -> None:
    config = ClusterConfig(model=str(real_model.path), dtype="bfloat16", ray=False, **ANY_PORTS)
    async with await LocalCluster.start(config) as cluster:
        answer = await run_cli("chat", "What is the capital of France?", "--address", cluster.address)
    assert "Paris" in answer
