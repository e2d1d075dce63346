"""A cluster of processes whose every link is TLS: tokens, KV, the admin port, and who is kept out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest
from transformers import LlamaForCausalLM

from baton import AsyncClient
from baton.client_tls import TlsConfig, opener
from baton.cluster.config import ClusterConfig
from baton.cluster.local_cluster import LocalCluster
from baton.cluster.status import fetch_status
from baton.errors import ConfigError, Unavailable
from baton.rpc import OpenChannel, open_channel, translate
from baton.tls import TlsFiles
from baton.v1.admin_service_pb2 import GetLedgerRequest
from baton.v1.admin_service_pb2_grpc import AdminServiceStub
from tests.certificates import Authority
from tests.integration.conftest import ANY_PORTS
from tests.integration.oracle import assert_greedy

PROMPT = list(range(40, 90))


def config(model: Path, tls: TlsFiles) -> ClusterConfig:
    return ClusterConfig(
        model=str(model),
        dtype="float32",
        kv_cache_bytes=16 << 20,
        placement="disaggregated",
        ray=False,
        tls_cert=tls.cert,
        tls_key=tls.key,
        tls_ca=tls.ca,
        tls_server_name=tls.server_name,
        **ANY_PORTS,
    )


async def ledger_is_told(address: str, opener: OpenChannel) -> bool:
    async with opener(address) as channel:
        try:
            await AdminServiceStub(channel).GetLedger(GetLedgerRequest(), timeout=5)
        except grpc.aio.AioRpcError as error:
            if not isinstance(translate(error), Unavailable):
                raise
            return False
    return True


async def test_a_request_through_a_cluster_with_tls(
    tiny_model: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    folder, reference = tiny_model
    # Like pods: one name in every certificate, no address. Clients dial the router by a name of its own.
    tls = replace(Authority(tmp_path).issue("baton.internal", "127.0.0.1"), server_name="baton.internal")
    async with await LocalCluster.start(config(folder, tls)) as cluster:
        async with await AsyncClient.connect(cluster.address, tls_ca=tls.ca) as client:
            generation = client.generate(token_ids=PROMPT, max_tokens=12, temperature=0, ignore_eos=True)
            tokens = [token async for chunk in generation for token in chunk.token_ids]
        assert len(tokens) == 12
        assert_greedy(reference, PROMPT, tokens)
        assert generation.summary.timings.transfer_bytes > 0

        workers = [worker.address for worker in (await cluster.status()).workers]
        assert len(workers) == 2
        for address in (*workers, cluster.admin_address):
            assert await ledger_is_told(address, tls.opener())
            assert not await ledger_is_told(address, opener(TlsConfig.trusting(tls.ca)))
            assert not await ledger_is_told(address, open_channel)
        with pytest.raises(Unavailable, match="a port with TLS does so to a peer without it"):
            await fetch_status(cluster.admin_address)


async def test_a_certificate_that_does_not_name_the_host_ends_the_start_at_once(
    tiny_model: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    nameless = Authority(tmp_path).issue("baton.internal")
    with pytest.raises(Unavailable, match="carries another name than the one dialled") as caught:
        await LocalCluster.start(config(tiny_model[0], nameless))
    assert caught.value.field == "tls_server_name"


async def test_a_missing_file_is_found_before_anything_is_started(
    tiny_model: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    tls = replace(Authority(tmp_path).issue("127.0.0.1"), key=str(tmp_path / "gone.pem"))
    with pytest.raises(ConfigError, match=r"gone\.pem"):
        await LocalCluster.start(config(tiny_model[0], tls))
