"""Certificates and authorities that are renewed while servers and diallers live."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import live_tls
from baton.client_tls import TlsConfig, opener
from baton.errors import ConfigError, Unavailable
from baton.live_tls import LiveTls
from baton.rpc import OpenChannel, open_channel, translate
from baton.rpc_server import LIVENESS, READINESS, RpcServer
from baton.tls import TlsFiles
from tests.certificates import Authority

HOST = "127.0.0.1"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_tls, "LOOK_EVERY_S", 0.0)


@pytest.fixture
def old(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "old")


@pytest.fixture
def new(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "new")


@pytest.fixture
def mounted(tmp_path: Path, old: Authority) -> TlsFiles:
    """Files at places that stay, as a Secret's are."""
    files = TlsFiles(
        cert=str(tmp_path / "tls.crt"), key=str(tmp_path / "tls.key"), ca=str(tmp_path / "ca.crt")
    )
    renew(files, old.issue(HOST))
    return files


def renew(mounted: TlsFiles, issued: TlsFiles) -> None:
    for name in ("cert", "key", "ca"):
        part = Path(getattr(mounted, name)).with_suffix(".part")
        shutil.copy(getattr(issued, name), part)
        part.replace(getattr(mounted, name))


async def health(address: str, opening: OpenChannel, service: str = "") -> int | None:
    """What the health service says; None if the connection is refused."""
    async with opening(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        ask = health_pb2.HealthCheckRequest(service=service)
        try:
            return int((await stub.Check(ask, timeout=5)).status)
        except grpc.aio.AioRpcError as error:
            if not isinstance(translate(error), Unavailable):
                raise
            return None


async def test_a_server_follows_its_files_and_its_authority(
    old: Authority, new: Authority, mounted: TlsFiles, tmp_path: Path
) -> None:
    of_old, of_new = old.issue(HOST), new.issue(HOST)
    async with await RpcServer.start([], credentials=mounted.server_credentials()) as server:
        await server.set_health(ready=True)
        assert await health(server.address, of_old.opener()) == SERVING
        assert await health(server.address, of_new.opener()) is None

        # A connection that stands goes on.
        async with of_old.opener()(server.address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status == SERVING
            renew(mounted, new.issue(HOST))
            assert await health(server.address, of_new.opener()) == SERVING
            assert await health(server.address, of_old.opener()) is None
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status == SERVING

        # Both authorities in one file: the way from one to the other without a refusal.
        both = tmp_path / "both.pem"
        both.write_bytes(old.path.read_bytes() + new.path.read_bytes())
        renew(mounted, replace(new.issue(HOST), ca=str(both)))
        assert await health(server.address, replace(of_old, ca=str(both)).opener()) == SERVING
        assert await health(server.address, of_new.opener()) == SERVING


async def test_who_dials_shows_what_its_files_hold_by_then(
    old: Authority, new: Authority, mounted: TlsFiles
) -> None:
    opening = mounted.opener()
    async with (
        await RpcServer.start([], credentials=old.issue(HOST).server_credentials()) as of_old,
        await RpcServer.start([], credentials=new.issue(HOST).server_credentials()) as of_new,
    ):
        assert await health(of_old.address, opening) == NOT_SERVING
        assert await health(of_new.address, opening) is None
        renew(mounted, new.issue(HOST))
        assert await health(of_new.address, opening) == NOT_SERVING
        assert await health(of_old.address, opening) is None


def test_half_a_renewal_changes_nothing_and_is_told_once(
    old: Authority, mounted: TlsFiles, caplog: pytest.LogCaptureFixture
) -> None:
    live = LiveTls(mounted)
    before = live.current()
    renewed = old.issue(HOST)
    shutil.copy(renewed.cert, mounted.cert)
    assert live.current() is live.current() is before
    (told,) = [record.getMessage() for record in caplog.records]
    assert "changed TLS files are not used" in told
    assert "tls_key" in told
    Path(mounted.ca).unlink()
    assert live.current() is before
    shutil.copy(renewed.key, mounted.key)
    shutil.copy(renewed.ca, mounted.ca)
    after = live.current()
    assert (after.cert, after.key) == (Path(renewed.cert).read_bytes(), Path(renewed.key).read_bytes())
    assert live.current() is after


def test_a_secret_that_is_swapped_as_a_whole_is_followed(old: Authority, tmp_path: Path) -> None:
    # As the kubelet does it: files are links into a folder whose name is a link that is replaced.
    issued = [old.issue(HOST), old.issue(HOST)]
    for index, files in enumerate(issued):
        folder = tmp_path / f"..version_{index}"
        folder.mkdir()
        for name in ("cert", "key", "ca"):
            shutil.copy(getattr(files, name), folder / name)
    data = tmp_path / "..data"
    data.symlink_to("..version_0")
    for name in ("cert", "key", "ca"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    live = LiveTls(TlsFiles(**{name: str(tmp_path / name) for name in ("cert", "key", "ca")}))
    assert live.current().cert == Path(issued[0].cert).read_bytes()
    (tmp_path / "..data_tmp").symlink_to("..version_1")
    (tmp_path / "..data_tmp").rename(data)
    pem = live.current()
    assert (pem.cert, pem.key) == (Path(issued[1].cert).read_bytes(), Path(issued[1].key).read_bytes())


def test_files_are_not_looked_at_for_every_handshake(
    old: Authority, mounted: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_tls, "LOOK_EVERY_S", 5.0)
    now = [100.0]
    live = LiveTls(mounted, clock=lambda: now[0])
    before = live.current()
    renew(mounted, old.issue(HOST))
    now[0] = 104.9
    assert live.current() is before
    now[0] = 105.0
    assert live.current() is not before


async def shown(port: int, context: ssl.SSLContext) -> bytes:
    """The certificate that a listener shows, in binary form."""
    _, writer = await asyncio.open_connection(HOST, port, ssl=context)
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return bytes(certificate)


def der(files: TlsFiles) -> bytes:
    return ssl.PEM_cert_to_DER_cert(Path(files.cert).read_text().split("-----END CERTIFICATE-----")[0] + END)


END = "-----END CERTIFICATE-----\n"


async def test_the_http_ports_context_follows_too(old: Authority, mounted: TlsFiles) -> None:
    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    context = mounted.public_context()
    assert context is not None
    server = await asyncio.start_server(hang_up, HOST, 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        client = ssl.create_default_context(cafile=str(old.path))
        assert await shown(port, client) == der(mounted)
        renewed = old.issue(HOST)
        renew(mounted, renewed)
        assert await shown(port, client) == der(renewed)


async def test_the_http_port_takes_the_clients_of_its_authority_of_now(
    old: Authority, new: Authority, mounted: TlsFiles, tmp_path: Path
) -> None:
    clients = tmp_path / "clients.crt"
    shutil.copy(new.path, clients)
    context = replace(mounted, client_ca=str(clients)).public_context()
    server = await asyncio.start_server(answer, HOST, 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        of_new, of_old = showing(old, new.issue("client")), showing(old, old.issue("client"))
        taken, session = await asyncio.to_thread(is_answered, port, of_new)
        assert taken
        assert not (await asyncio.to_thread(is_answered, port, of_old))[0]
        assert not (await asyncio.to_thread(is_answered, port, ssl.create_default_context(cafile=old.path)))[
            0
        ]

        shutil.copy(old.path, clients)
        assert (await asyncio.to_thread(is_answered, port, of_old))[0]
        assert not (await asyncio.to_thread(is_answered, port, of_new))[0]
        # Nor does it get in by going on with a session of before.
        assert not (await asyncio.to_thread(is_answered, port, of_new, session))[0]


async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"x")
    writer.close()


def showing(trusted: Authority, client: TlsFiles) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=trusted.path)
    context.load_cert_chain(client.cert, client.key)
    return context


def is_answered(
    port: int, context: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> tuple[bool, ssl.SSLSession | None]:
    """Whether a byte comes, and the session; asyncio's streams take up none."""
    try:
        with (
            socket.create_connection((HOST, port), timeout=5) as plain,
            context.wrap_socket(plain, server_hostname=HOST, session=session) as connection,
        ):
            return connection.recv(1) == b"x", connection.session
    except (ssl.SSLError, ConnectionError):
        return False, None


async def test_doors_may_ask_clients_for_certificates(
    old: Authority, new: Authority, mounted: TlsFiles
) -> None:
    client = new.issue("client.internal")
    shows = TlsConfig(
        ca=old.path.read_bytes(), cert=Path(client.cert).read_bytes(), key=Path(client.key).read_bytes()
    )
    asking = replace(mounted, client_ca=str(new.path))
    async with await RpcServer.start([], credentials=asking.public_server_credentials()) as server:
        assert await health(server.address, opener(shows)) == NOT_SERVING
        assert await health(server.address, opener(TlsConfig(ca=old.path.read_bytes()))) is None
        # The cluster's own authority signs no clients.
        assert await health(server.address, mounted.opener()) is None
    with pytest.raises(ConfigError) as caught:
        replace(mounted, client_ca=mounted.key).public_server_credentials()
    assert caught.value.field == "client_ca"


async def test_probes_that_speak_no_tls_have_a_port_with_health_alone(mounted: TlsFiles) -> None:
    async with await RpcServer.start([], credentials=mounted.server_credentials(), health_port=0) as server:
        address = f"{HOST}:{server.health_port}"
        assert await health(address, open_channel, LIVENESS) == SERVING
        assert await health(address, open_channel, READINESS) == NOT_SERVING
        await server.set_health(ready=True)
        assert await health(address, open_channel, READINESS) == SERVING
        assert await health(server.address, open_channel, READINESS) is None
        async with open_channel(address) as channel:
            reflect: Any = channel.unary_unary(
                "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await reflect(b"")
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert await health(address, open_channel) is None


async def test_a_taken_health_port_is_named(mounted: TlsFiles) -> None:
    async with await RpcServer.start([]) as server:
        with pytest.raises(ConfigError, match=f"{server.port}") as caught:
            await RpcServer.start([], health_port=server.port)
    assert caught.value.field == "health_port"
