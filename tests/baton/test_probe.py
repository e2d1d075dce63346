"""What the command of a container's health check says, and with which status."""

from __future__ import annotations

import asyncio

import pytest

from baton.errors import ConfigError
from baton.probe import main
from baton.rpc_server import RpcServer


async def told(capsys: pytest.CaptureFixture[str], *argv: str, **environ: str) -> tuple[int, str]:
    status = await asyncio.to_thread(main, argv, environ)
    return status, capsys.readouterr().out


async def test_it_says_what_the_process_says_of_itself(capsys: pytest.CaptureFixture[str]) -> None:
    async with await RpcServer.start([], health_port=0) as server:
        port = str(server.health_port)
        assert await told(capsys, port) == (1, "readiness: NOT_SERVING\n")
        assert await told(capsys, port, "--service=liveness") == (0, "liveness: SERVING\n")
        await server.set_health(ready=True)
        assert await told(capsys, port) == (0, "readiness: SERVING\n")
        await server.set_health(ready=False, alive=False)
        assert await told(capsys, port, "--service=liveness") == (1, "liveness: NOT_SERVING\n")
    status, text = await told(capsys, port)
    assert status == 1
    assert text.startswith(f"127.0.0.1:{port} does not answer: ")


async def test_the_port_is_that_of_the_variable_which_the_process_has_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A proxy for the rest of the world is none for this machine.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with await RpcServer.start([], health_port=0) as server:
        await server.set_health(ready=True)
        port = str(server.health_port)
        assert await told(capsys, BATON_PREFILL_HEALTH_PORT=port, BATON_PREFILL_PORT="1") == (
            0,
            "readiness: SERVING\n",
        )


async def test_a_service_that_nobody_knows_is_not_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    async with await RpcServer.start([], health_port=0) as server:
        await server.set_health(ready=True)
        status, text = await told(capsys, str(server.health_port), "--service=other")
        assert status == 1
        assert "does not answer" in text


@pytest.mark.parametrize("variables", [{}, {"BATON_ROUTER_HEALTH_PORT": "1", "BATON_POOL_HEALTH_PORT": "2"}])
def test_a_probe_that_does_not_know_whom_to_ask_says_so(variables: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="BATON_ROUTER_HEALTH_PORT") as failure:
        main([], variables)
    assert failure.value.field == "port"
