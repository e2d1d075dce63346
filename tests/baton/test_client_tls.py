"""TLS of a client, with PEM as bytes: whom it trusts, what it shows, and what is no PEM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from baton import AsyncClient, TlsConfig
from baton.errors import ConfigError, Unavailable
from tests.baton.scripted_router import serving
from tests.certificates import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


async def test_a_router_may_carry_another_name_than_the_dialled_one(authority: Authority) -> None:
    credentials = authority.issue("router.internal").public_server_credentials()
    ca = authority.path.read_bytes()
    async with serving(credentials=credentials) as (_, server):
        tls = TlsConfig(ca=ca, server_name="router.internal")
        async with await AsyncClient.connect(server.address, tls=tls) as client:
            assert await client.generate("hello").text() == "one two"
        with pytest.raises(Unavailable, match="carries another name than the one dialled") as error:
            await AsyncClient.connect(server.address, tls=TlsConfig(ca=ca), timeout_s=0.3)
        assert error.value.field == "tls_server_name"


async def test_a_proxy_that_asks_for_a_certificate_is_shown_one(authority: Authority) -> None:
    proxy, own = authority.issue("127.0.0.1"), authority.issue("client")
    ca, cert, key = (Path(path).read_bytes() for path in (own.ca, own.cert, own.key))
    async with serving(credentials=proxy.server_credentials()) as (_, server):
        tls = TlsConfig(ca=ca, cert=cert, key=key)
        async with await AsyncClient.connect(server.address, tls=tls) as client:
            assert await client.generate("hello").text() == "one two"
        with pytest.raises(Unavailable, match="no router answers"):
            await AsyncClient.connect(server.address, tls=TlsConfig(ca=ca), timeout_s=0.3)


async def test_the_public_authorities_do_not_vouch_for_ours(authority: Authority) -> None:
    credentials = authority.issue("127.0.0.1").public_server_credentials()
    async with serving(credentials=credentials) as (scripted, server):
        with pytest.raises(Unavailable, match="does not pass the check against tls_ca"):
            await AsyncClient.connect(server.address, tls=True, timeout_s=0.3)
        assert scripted.metadata == []


async def test_a_router_in_plain_text_is_recognized() -> None:
    async with serving() as (_, server):
        with pytest.raises(Unavailable, match="it speaks plain text, this side TLS"):
            await AsyncClient.connect(server.address, tls=True, timeout_s=0.3)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"ca": b"none"}, "tls.ca"),
        ({"ca": "ca.pem"}, "tls.ca"),
        ({"cert": b"none", "key": b"none"}, "tls.cert"),
        ({"key": b"-----BEGIN PRIVATE KEY-----"}, "tls.cert"),
    ],
)
def test_what_is_no_pem_is_refused_by_field(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        TlsConfig(**given)
    assert error.value.field == field


def test_a_certificate_needs_its_key(authority: Authority) -> None:
    cert = Path(authority.issue("a").cert).read_bytes()
    for given, what in (({}, "key of tls is not set"), ({"key": b"none"}, "holds no private key")):
        with pytest.raises(ConfigError, match=what) as error:
            TlsConfig(cert=cert, **given)
        assert error.value.field == "tls.key"


def test_a_key_is_not_shown(authority: Authority) -> None:
    own = authority.issue("a")
    tls = TlsConfig(cert=Path(own.cert).read_bytes(), key=Path(own.key).read_bytes())
    assert repr(tls) == "TlsConfig(server_name='')"
    assert isinstance(grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert), grpc.ChannelCredentials)
