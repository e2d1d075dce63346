"""`baton up`: starts a cluster on this machine and keeps it running."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from baton.cli.cluster_console import ClusterConsole
from baton.cli.exit_codes import EXIT_INTERRUPTED
from baton.cli.interrupts import Interrupts
from baton.cli.options import AsJson, ConfigFile
from baton.cluster.config import ClusterConfig
from baton.cluster.defaults import DEFAULT_ADDRESS, MAX_WORKERS
from baton.config import load_config

if TYPE_CHECKING:
    from baton.cluster.local_cluster import LocalCluster

_NOT_OF_THE_CLUSTER = ("config", "as_json")

# One alias per option keeps the command itself on one screen.
Prefill = Annotated[
    int | None,
    typer.Option(help=f"Prefill workers, up to {MAX_WORKERS}.", show_default="1, or 0 where colocated"),
]
Decode = Annotated[int | None, typer.Option(help=f"Decode workers, 1 to {MAX_WORKERS}.", show_default="1")]
Routers = Annotated[int | None, typer.Option(help="Routers.", show_default="1")]
Model = Annotated[
    str | None, typer.Option(help="A pulled model or a folder.", show_default="smollm2-135m-instruct")
]
Threads = Annotated[
    int | None,
    typer.Option(help="Threads of each worker.", show_default="usable cores // all workers, at least 1"),
]
Dtype = Annotated[
    str | None,
    typer.Option(help="auto, bfloat16, float16 or float32.", show_default="the checkpoint's"),
]
PrefillKvDtype = Annotated[
    str | None,
    typer.Option(help="KV cache of prefill workers: as --dtype.", show_default="that of the weights"),
]
DecodeKvDtype = Annotated[
    str | None,
    typer.Option(help="KV cache of decode workers: as --dtype.", show_default="that of the weights"),
]
Compile = Annotated[
    bool | None,
    typer.Option("--compile/--no-compile", help="Workers compile their layers.", show_default="no-compile"),
]
KvCacheBytes = Annotated[
    int | None,
    typer.Option(
        help="KV cache of each worker, in bytes.", show_default="10 % of the free memory // all workers"
    ),
]
Placement = Annotated[
    str | None,
    typer.Option(help="Who computes prompts: auto, disaggregated or colocated.", show_default="auto"),
]
KvTransport = Annotated[
    str | None, typer.Option(help="How KV travels: auto, shm, nixl or grpc.", show_default="auto")
]
Port = Annotated[
    int | None,
    typer.Option(help="Public gRPC port; each further router's is 10 above.", show_default="50051"),
]
HttpPort = Annotated[
    int | None, typer.Option(help="Public HTTP port; the others' in the same way.", show_default="8000")
]
AdminPort = Annotated[
    int | None, typer.Option(help="Admin gRPC port; the others' in the same way.", show_default="50052")
]
ControlPort = Annotated[
    int | None,
    typer.Option(help="Port of `baton workers`, `baton scale` and `baton drain`.", show_default="50053"),
]
DashboardPort = Annotated[int | None, typer.Option(help="Port of the Ray dashboard.", show_default="8265")]
RedisUrl = Annotated[
    str | None,
    typer.Option(
        help="Your own Redis. With a password, set BATON_CLUSTER_REDIS_URL instead.",
        show_default="an embedded one",
    ),
]
UseRay = Annotated[
    bool | None, typer.Option("--ray/--no-ray", help="Decode workers as Ray actors.", show_default="ray")
]
PrefillOn = Annotated[
    str | None,
    typer.Option(help="process or ray: prefill workers as Ray actors too.", show_default="process"),
]
RayAddress = Annotated[str | None, typer.Option(help="Ray cluster to use.", show_default="a local Ray")]
TraceFile = Annotated[Path | None, typer.Option(help="Append the spans of all processes here as JSON lines.")]
LogDir = Annotated[
    Path | None, typer.Option(help="Folder of the logs.", show_default="one per run, in the cache")
]
TlsCert = Annotated[
    Path | None, typer.Option(help="PEM file: certificate of all roles, for TLS.", show_default="plain text")
]
TlsKey = Annotated[Path | None, typer.Option(help="PEM file: private key of that certificate.")]
TlsCa = Annotated[Path | None, typer.Option(help="PEM file: who signed it.")]
TlsServerName = Annotated[
    str | None, typer.Option(help="Name in that certificate.", show_default="127.0.0.1")
]
Drain = Annotated[
    float | None,
    typer.Option(help="Seconds that running requests have to end when a process leaves.", show_default="5"),
]
StartTimeout = Annotated[float | None, typer.Option(help="Longest wait for all workers.", show_default="120")]


def up(
    *,
    prefill: Prefill = None,
    decode: Decode = None,
    routers: Routers = None,
    model: Model = None,
    threads: Threads = None,
    dtype: Dtype = None,
    prefill_kv_dtype: PrefillKvDtype = None,
    decode_kv_dtype: DecodeKvDtype = None,
    compile: Compile = None,  # noqa: A002  (the option's name)
    kv_cache_bytes: KvCacheBytes = None,
    placement: Placement = None,
    kv_transport: KvTransport = None,
    port: Port = None,
    http_port: HttpPort = None,
    admin_port: AdminPort = None,
    control_port: ControlPort = None,
    dashboard_port: DashboardPort = None,
    redis_url: RedisUrl = None,
    ray: UseRay = None,
    prefill_on: PrefillOn = None,
    ray_address: RayAddress = None,
    trace_file: TraceFile = None,
    log_dir: LogDir = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    tls_server_name: TlsServerName = None,
    drain_s: Drain = None,
    start_timeout_s: StartTimeout = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Start a cluster on this machine and keep it running until Ctrl-C.

    Settings not given here come from BATON_CLUSTER_* variables, then from the table "cluster" of the file;
    the roles also read their own tables, "router", "prefill" and "decode". A worker that dies is started
    again, and so is one that SIGTERM has drained. `baton scale` changes how many there are. A second Ctrl-C
    ends everything at once. --json prints the addresses once they can be used.
    """
    given = {name: v for name, v in locals().items() if name not in _NOT_OF_THE_CLUSTER and v is not None}
    settings = load_config(
        ClusterConfig,
        section="cluster",
        argv=[*_flags(given), *([f"--config={config}"] if config else [])],
        environ=os.environ,
    )
    console = ClusterConsole(Console(stderr=True))
    interrupts = Interrupts(
        on_first=lambda: console("stopping; Ctrl-C again ends it at once"), on_second=exit_now
    )
    asyncio.run(interrupts.run(_up(settings, str(config or ""), console, as_json=as_json)))
    console.say("stopped")


def exit_now() -> NoReturn:
    """Ends this process; the kernel and the guard end what it started."""
    os._exit(EXIT_INTERRUPTED)


async def _up(settings: ClusterConfig, config_file: str, console: ClusterConsole, *, as_json: bool) -> None:
    cluster = await console.start(settings, config_file)
    async with cluster:
        print_endpoints(cluster, console)
        if as_json:
            # At once, also into a pipe: whoever reads it waits for it.
            sys.stdout.write(json.dumps(endpoints(cluster)) + "\n")
            sys.stdout.flush()
        await cluster.run()


def endpoints(cluster: LocalCluster) -> dict[str, Any]:
    """Where the cluster can be reached, as plain JSON values; lists are in the order of the routers."""
    return {
        "model": cluster.config.model,
        "grpc": cluster.addresses,
        "http": cluster.http_urls,
        "admin": cluster.admin_addresses,
        "control": cluster.control_address,
        "dashboard_url": cluster.dashboard_url if cluster.config.ray else "",
        "log_dir": str(cluster.log_dir),
    }


def print_endpoints(cluster: LocalCluster, console: ClusterConsole) -> None:
    """Where the cluster can be reached, and what to try next."""
    config = cluster.config
    facts = {
        "model": f"{config.model}, {config.num_threads} thread(s) per worker",
        "gRPC": ", ".join(cluster.addresses),
        "HTTP": f"{', '.join(cluster.http_urls)} (OpenAI's API)",
        "admin": ", ".join(cluster.admin_addresses),
        "control": f"{cluster.control_address} (`baton workers` lists the workers)",
        "Ray dashboard": f"{cluster.dashboard_url} (`ray get-auth-token` prints its token)",
        "logs": str(cluster.log_dir),
    }
    if not config.ray:
        del facts["Ray dashboard"]
    for name, value in facts.items():
        console.say(f"{name:>14}  {value}")
    address = "" if cluster.address == DEFAULT_ADDRESS else f" --address {cluster.address}"
    tls = f" --tls-ca {config.tls_ca}" if config.tls_ca else ""
    console.say(f'{"try":>14}  baton chat{address}{tls} "What is the capital of France?"')


def _flags(given: dict[str, object]) -> list[str]:
    flags = []
    for name, value in given.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags.append(f"--{flag}={value}")
    return flags
