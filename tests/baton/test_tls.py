"""TLS between real loopback ports: who gets in, who does not, and what is said of it."""

from __future__ import annotations

import asyncio
import ssl
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography.hazmat.primitives import serialization
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import AsyncClient, Client
from baton.client_tls import TlsConfig, opener
from baton.cluster.config import ClusterConfig
from baton.config import load_config
from baton.errors import ConfigError, Unavailable
from baton.pool.config import PoolConfig
from baton.rpc import OpenChannel, open_channel, translate
from baton.rpc_server import RpcServer
from baton.tls import TlsFiles
from decode_worker.config import DecodeConfig
from prefill_worker.config import PrefillConfig
from router.config import RouterConfig
from tests.baton.scripted_router import background, serving
from tests.certificates import Authority

HOST = "127.0.0.1"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def files(authority: Authority) -> TlsFiles:
    return authority.issue(HOST)


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "stranger")


@asynccontextmanager
async def port(credentials: grpc.ServerCredentials | None) -> AsyncIterator[str]:
    async with await RpcServer.start([], credentials=credentials) as server:
        await server.set_health(ready=True)
        yield server.address


# UNKNOWN, which is 0, is what an empty answer would read as.
SERVING = health_pb2.HealthCheckResponse.SERVING


async def ask(address: str, opener: OpenChannel) -> int:
    """One call: the health status in its answer; raises what it means if it fails."""
    async with opener(address) as channel:
        try:
            reply = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=5
            )
            return int(reply.status)
        except grpc.aio.AioRpcError as error:
            raise translate(error) from None


async def refusal(address: str, opener: OpenChannel) -> Unavailable:
    with pytest.raises(Unavailable) as caught:
        await ask(address, opener)
    return caught.value


async def test_peers_of_one_authority_talk(authority: Authority, files: TlsFiles) -> None:
    async with port(files.server_credentials()) as address:
        assert await ask(address, authority.issue("another").opener()) == SERVING


async def test_an_internal_port_refuses_who_shows_no_certificate_of_its_authority(
    files: TlsFiles, stranger: Authority
) -> None:
    unsigned = replace(stranger.issue(HOST), ca=files.ca)
    async with port(files.server_credentials()) as address:
        for opening in (open_channel, opener(TlsConfig.trusting(files.ca)), unsigned.opener()):
            error = await refusal(address, opening)
            assert error.field == "tls_cert"
            assert error.message.startswith(
                "the connection was closed before a word was said; a port with TLS"
            )


async def test_no_port_speaks_an_old_version(files: TlsFiles) -> None:
    new, old = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_1
    async with await RpcServer.start([], credentials=files.server_credentials()) as server:
        assert await agreed(server.port, files, new) == "TLSv1.2"
        assert await agreed(server.port, files, old) is None
    context = files.public_context()
    async with listening(context) as port:
        assert await agreed(port, files, new) == "TLSv1.2"
        assert await agreed(port, files, old) is None
    # This client does speak it, to whoever lets it.
    lax = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    lax.load_cert_chain(files.cert, files.key)
    async with listening(limited(lax, old)) as port:
        assert await agreed(port, files, old) == "TLSv1.1"


@asynccontextmanager
async def listening(context: ssl.SSLContext | None) -> AsyncIterator[int]:
    async with await asyncio.start_server(lambda _, writer: writer.close(), HOST, 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]


def limited(context: ssl.SSLContext, version: ssl.TLSVersion) -> ssl.SSLContext:
    """The same, for this version alone."""
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        context.minimum_version = context.maximum_version = version
    return context


async def agreed(port: int, files: TlsFiles, version: ssl.TLSVersion) -> str | None:
    """The version that the port and a client of this one alone agree on; None if they do not."""
    context = limited(ssl.create_default_context(cafile=files.ca), version)
    context.load_cert_chain(files.cert, files.key)
    context.set_alpn_protocols(["h2"])
    try:
        _, writer = await asyncio.open_connection(HOST, port, ssl=context)
    except (ssl.SSLError, ConnectionError):
        return None
    version_spoken = str(writer.get_extra_info("ssl_object").version())
    writer.close()
    return version_spoken


async def test_a_server_of_another_authority_is_not_talked_to(files: TlsFiles, stranger: Authority) -> None:
    deceived = replace(files, ca=str(stranger.path))
    async with port(files.server_credentials()) as address:
        error = await refusal(address, deceived.opener())
    assert error.field == "tls_ca"
    assert error.message.startswith("its certificate does not pass the check against tls_ca")


async def test_a_certificate_must_name_the_host_or_what_is_set_instead(
    authority: Authority, files: TlsFiles
) -> None:
    async with port(authority.issue("worker.baton").server_credentials()) as address:
        error = await refusal(address, files.opener())
        assert error.field == "tls_server_name"
        assert error.message.startswith("its certificate carries another name than the one dialled")
        await ask(address, replace(files, server_name="worker.baton").opener())
        assert (
            await refusal(address, replace(files, server_name="other").opener())
        ).field == "tls_server_name"


async def test_a_port_in_plain_text_is_recognized(files: TlsFiles) -> None:
    async with port(None) as address:
        error = await refusal(address, files.opener())
    assert error.field == "tls_cert"
    assert error.message.startswith("it speaks plain text, this side TLS")


async def test_a_client_needs_no_more_than_the_authority(files: TlsFiles) -> None:
    async with (
        serving(credentials=files.public_server_credentials()) as (_, server),
        await AsyncClient.connect(server.address, tls_ca=Path(files.ca)) as client,
    ):
        assert await client.generate("hello").text() == "one two"


def test_so_does_a_client_without_a_loop(files: TlsFiles) -> None:
    with (
        background(credentials=files.public_server_credentials()) as (_, address),
        Client.connect(address, tls_ca=files.ca) as client,
    ):
        assert client.generate("hello").text() == "one two"


async def test_a_client_that_cannot_check_the_router_does_not_connect(
    files: TlsFiles, stranger: Authority
) -> None:
    async with serving(credentials=files.public_server_credentials()) as (_, server):
        for tls_ca in (stranger.path, None):
            with pytest.raises(Unavailable, match="a router with TLS takes tls_ca"):
                await AsyncClient.connect(server.address, timeout_s=0.3, tls_ca=tls_ca)
    with pytest.raises(ConfigError) as caught:
        await AsyncClient.connect(server.address, tls_ca=files.key)
    assert caught.value.field == "tls_ca"


def test_without_files_everything_is_plain_text() -> None:
    files = TlsFiles()
    assert files.server_credentials() is None
    assert files.public_server_credentials() is None
    assert files.channel_credentials() is None


def test_clients_are_asked_for_certificates_over_tls_only() -> None:
    with pytest.raises(ConfigError, match="nor client_ca for plain text") as caught:
        RouterConfig(model="m", client_ca="clients.pem")
    assert caught.value.field == "tls_cert"
    config = RouterConfig(model="m", client_ca="clients.pem", tls_cert="c", tls_key="k", tls_ca="a")
    assert config.tls.client_ca == "clients.pem"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"tls_cert": "c"}, "tls_key"),
        ({"tls_key": "k", "tls_ca": "a"}, "tls_cert"),
        ({"tls_cert": "c", "tls_key": "k"}, "tls_ca"),
        ({"tls_server_name": "n"}, "tls_cert"),
    ],
)
@pytest.mark.parametrize("cls", [RouterConfig, PrefillConfig, DecodeConfig, PoolConfig, ClusterConfig])
def test_every_config_takes_all_files_or_none(cls: type[Any], given: dict[str, str], field: str) -> None:
    environ = {f"BATON_X_{name.upper()}": value for name, value in given.items()}
    if "model" in cls.__dataclass_fields__:
        environ["BATON_X_MODEL"] = "m"
    with pytest.raises(ConfigError, match="set all three, or none") as caught:
        load_config(cls, section="x", argv=[], environ=environ)
    assert caught.value.field == field
    complete = {f"BATON_X_TLS_{name}": name.lower() for name in ("CERT", "KEY", "CA", "SERVER_NAME")}
    config = load_config(cls, section="x", argv=[], environ=environ | complete)
    assert config.tls == TlsFiles(cert="cert", key="key", ca="ca", server_name="server_name")


@pytest.mark.parametrize("name", ["cert", "key", "ca"])
@pytest.mark.parametrize(
    ("file", "why"), [("nothing", "No such file or directory"), ("folder", "Is a directory")]
)
def test_a_file_that_cannot_be_read_is_named(
    files: TlsFiles, tmp_path: Path, name: str, file: str, why: str
) -> None:
    (tmp_path / "folder").mkdir()
    broken = replace(files, **{name: str(tmp_path / file)})
    with pytest.raises(ConfigError, match=f"{file}', which cannot be read: {why}") as caught:
        broken.server_credentials()
    assert caught.value.field == f"tls_{name}"


@pytest.mark.parametrize("name", ["cert", "key", "ca"])
def test_a_file_that_holds_something_else_is_named_and_not_shown(
    files: TlsFiles, tmp_path: Path, name: str
) -> None:
    file = tmp_path / "odd.pem"
    file.write_text("# größer\n-----BEGIN SECRET-----\nc2VjcmV0\n-----END SECRET-----\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"odd\.pem") as caught:
        replace(files, **{name: str(file)}).channel_credentials()
    assert caught.value.field == f"tls_{name}"
    assert "c2Vj" not in caught.value.message


def test_a_key_of_another_certificate_is_refused(authority: Authority, files: TlsFiles) -> None:
    with pytest.raises(ConfigError, match="belongs to the first certificate") as caught:
        replace(files, key=authority.issue(HOST).key).server_credentials()
    assert caught.value.field == "tls_key"


def test_a_key_with_a_password_is_refused_and_nobody_is_asked(files: TlsFiles, tmp_path: Path) -> None:
    key = serialization.load_pem_private_key(Path(files.key).read_bytes(), None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ConfigError, match="without a password") as caught:
        replace(files, key=str(locked)).channel_credentials()
    assert caught.value.field == "tls_key"


async def test_comments_beside_the_certificates_may_be_in_any_language(files: TlsFiles) -> None:
    ca = Path(files.ca)
    ca.write_text("# Zertifizierungsstelle für Tests\n" + ca.read_text(encoding="ascii"), encoding="utf-8")
    async with port(files.server_credentials()) as address:
        assert await ask(address, files.opener()) == SERVING
