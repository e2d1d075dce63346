"""A cluster of processes whose every link is TLS: tokens, KV, the admin port, who is kept out, renewals."""

from __future__ import annotations

import asyncio
import re
import shutil
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc.aio
import httpx
import pytest
import pytest_asyncio
from transformers import LlamaForCausalLM

from baton import AsyncClient
from baton.client_tls import TlsConfig, opener
from baton.cluster.config import ClusterConfig
from baton.cluster.local_cluster import LocalCluster
from baton.cluster.status import fetch_status
from baton.errors import ConfigError, Unavailable
from baton.live_tls import LOOK_EVERY_S
from baton.rpc import OpenChannel, open_channel, translate
from baton.tls import TlsFiles
from baton.v1.admin_service_pb2 import GetLedgerRequest
from baton.v1.admin_service_pb2_grpc import AdminServiceStub
from tests.certificates import Authority
from tests.integration.conftest import ANY_PORTS
from tests.integration.oracle import assert_greedy

pytestmark = pytest.mark.asyncio(loop_scope="session")

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


@dataclass(frozen=True)
class Secured:
    """A cluster, the authority that signed its certificate, and where its files are mounted."""

    cluster: LocalCluster
    authority: Authority
    tls: TlsFiles

    async def internal_ports(self) -> list[str]:
        status = await self.cluster.status()
        return [*(worker.address for worker in status.workers), self.cluster.admin_address]

    def mount(self, issued: TlsFiles, ca: Path) -> None:
        for source, target in ((issued.cert, self.tls.cert), (issued.key, self.tls.key), (ca, self.tls.ca)):
            part = Path(target).with_suffix(".part")
            shutil.copy(source, part)
            part.replace(target)


# Like pods: one name in every certificate, no address. Clients dial the router by a name of its own.
NAMES = ("baton.internal", "127.0.0.1")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def secured(
    tiny_model: tuple[Path, LlamaForCausalLM], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Secured]:
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder, "old")
    issued = authority.issue(*NAMES, not_after=datetime.now(UTC) + timedelta(days=6))
    files = {name: str(folder / name) for name in ("cert", "key", "ca")}
    for name, path in files.items():
        shutil.copy(getattr(issued, name), path)
    tls = TlsFiles(server_name="baton.internal", **files)
    async with await LocalCluster.start(config(tiny_model[0], tls)) as cluster:
        yield Secured(cluster, authority, tls)


async def ledger_is_told(address: str, opener: OpenChannel) -> bool:
    async with opener(address) as channel:
        try:
            await AdminServiceStub(channel).GetLedger(GetLedgerRequest(), timeout=5)
        except grpc.aio.AioRpcError as error:
            if not isinstance(translate(error), Unavailable):
                raise
            return False
    return True


async def answered(client: AsyncClient) -> list[int]:
    generation = client.generate(token_ids=PROMPT, max_tokens=12, temperature=0, ignore_eos=True)
    return [token async for chunk in generation for token in chunk.token_ids]


async def test_a_request_through_a_cluster_with_tls(
    tiny_model: tuple[Path, LlamaForCausalLM], secured: Secured
) -> None:
    cluster, tls = secured.cluster, secured.tls
    async with await AsyncClient.connect(cluster.address, tls_ca=tls.ca) as client:
        generation = client.generate(token_ids=PROMPT, max_tokens=12, temperature=0, ignore_eos=True)
        tokens = [token async for chunk in generation for token in chunk.token_ids]
    assert len(tokens) == 12
    assert_greedy(tiny_model[1], PROMPT, tokens)
    assert generation.summary.timings.transfer_bytes > 0

    ports = await secured.internal_ports()
    assert len(ports) == 3
    for address in ports:
        assert await ledger_is_told(address, tls.opener())
        assert not await ledger_is_told(address, opener(TlsConfig.trusting(tls.ca)))
        assert not await ledger_is_told(address, open_channel)
    with pytest.raises(Unavailable, match="a port with TLS does so to a peer without it"):
        await fetch_status(cluster.admin_address)


async def test_every_process_tells_when_its_certificate_ends(secured: Secured) -> None:
    for name in ("router-0", "prefill-0", "decode-0"):
        log = (secured.cluster.log_dir / f"{name}.log").read_text()
        assert log.count("the certificate ends soon") == 1, name
    metrics = f"{secured.cluster.http_urls[0].removesuffix('v1')}metrics"
    async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=secured.tls.ca)) as http:
        shown = (await http.get(metrics)).text
    found = re.search(r"^baton_tls_certificate_remaining_seconds (\S+)$", shown, re.MULTILINE)
    assert found is not None
    assert float(found[1]) == pytest.approx(6 * 86_400, abs=120)


async def test_another_authority_takes_over_while_answers_run(secured: Secured, tmp_path: Path) -> None:
    old, new = secured.authority, Authority(tmp_path, "new")
    both = tmp_path / "both.pem"
    both.write_bytes(old.path.read_bytes() + new.path.read_bytes())
    of_old, of_new = (
        replace(authority.issue(*NAMES), ca=str(both), server_name="baton.internal")
        for authority in (old, new)
    )
    cluster = secured.cluster
    is_over = asyncio.Event()
    num_answers = 0

    async def ask(standing: AsyncClient) -> None:
        nonlocal num_answers
        while not is_over.is_set():
            async with await AsyncClient.connect(cluster.address, tls_ca=both) as fresh:
                assert await answered(standing) == await answered(fresh) == expected
            num_answers += 2

    async with await AsyncClient.connect(cluster.address, tls_ca=both) as standing:
        expected = await answered(standing)
        assert len(expected) == 12
        asking = asyncio.create_task(ask(standing))
        ports = await secured.internal_ports()
        for issued, ca in ((of_old, both), (of_new, both), (of_new, new.path)):
            secured.mount(issued, ca)
            await asyncio.sleep(LOOK_EVERY_S + 0.2)
            assert not asking.done()
        for address in ports:
            assert await ledger_is_told(address, of_new.opener())
            assert not await ledger_is_told(address, of_old.opener())

        # Whoever is met from now on has files of the new authority alone, as those who dial it.
        await cluster.scale("decode", 2)
        await cluster.wait_ready(30)
        await cluster.drain("decode-0")
        async with asyncio.timeout(30):
            while "decode-0" in {worker.name for worker in (await cluster.status()).workers}:
                assert not asking.done()
                await asyncio.sleep(0.1)
        assert await answered(standing) == expected
        is_over.set()
        await asking
    assert num_answers > 20


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
