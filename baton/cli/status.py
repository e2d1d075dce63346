"""`baton status`: the cluster as its router sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from baton.cli.options import DEFAULT_ADMIN, AdminAddress, AsJson, with_tls
from baton.cli.whole_table import print_whole
from baton.cli.worker_words import role_name
from baton.cluster.status import fetch_status
from baton.tls import TlsFiles
from baton.v1 import admin_service_pb2, common_pb2

# Usually within 80 columns; --json has every field.
_LEFT = ("worker", "role", "state", "address", "dtype")
_RIGHT = ("free", "blocks", "size", "run", "wait", "credit")


@with_tls
def status(
    *,
    address: AdminAddress = DEFAULT_ADMIN,
    tls: TlsFiles,
    as_json: AsJson = False,
) -> None:
    """Show workers, length buckets and queues. Exit code 3: nothing answers at the address.

    With TLS the admin port lets only holders of a certificate of the cluster in.
    """
    found = asyncio.run(fetch_status(address, opener=tls.opener()))
    if as_json:
        typer.echo(json.dumps(as_dict(found)))
        return
    console = Console(highlight=False, markup=False, soft_wrap=True)
    release = f" (release {found.release})" if found.release else ""
    console.print(f"model {found.model}, {found.router}{release}, requests in flight: {found.num_requests}")
    print_whole(console, workers_table(found))
    for worker in found.workers:
        if worker.reason:
            console.print(f"note: {worker.name} {worker.state}: {worker.reason}", soft_wrap=True)
    for line in (*release_lines(found), *pair_lines(found)):
        console.print(line, soft_wrap=True)
    print_whole(console, _buckets_table(found))
    console.print()
    for line in routing_lines(found.routing):
        console.print(line, soft_wrap=True)
    if found.dashboard_url:
        console.print(f"\nRay dashboard: {found.dashboard_url}")


def as_dict(found: admin_service_pb2.GetClusterStatusResponse) -> dict[str, Any]:
    """The status as plain JSON values, with the field names of the proto; every field is present."""
    workers = [
        {**_fields(worker), "role": role_name(worker.role), "pairs": [_fields(pair) for pair in worker.pairs]}
        for worker in found.workers
    ]
    buckets = [_fields(bucket) for bucket in found.buckets]
    return {**_fields(found), "workers": workers, "buckets": buckets, "routing": _fields(found.routing)}


def workers_table(found: admin_service_pb2.GetClusterStatusResponse) -> Table:
    """One row per worker; what a role does not have is a dash. free and blocks count KV blocks, size is
    tokens per block; run and wait count requests, credit tokens.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for title in _LEFT:
        table.add_column(title, no_wrap=True)
    for title in _RIGHT:
        table.add_column(title, justify="right", no_wrap=True)
    for worker in found.workers:
        is_prefill = worker.role == common_pb2.ROLE_PREFILL
        table.add_row(
            worker.name,
            role_name(worker.role),
            worker.state,
            worker.address,
            worker.kv_dtype,
            str(worker.num_free_blocks),
            str(worker.num_blocks),
            str(worker.block_size),
            str(worker.num_running),
            str(worker.num_waiting),
            str(worker.credit_tokens) if is_prefill else "-",
        )
    return table


def release_lines(found: admin_service_pb2.GetClusterStatusResponse) -> Iterator[str]:
    """The workers that run another release than the router, as they do in the middle of an upgrade."""
    for worker in found.workers:
        if worker.release not in ("", found.release):
            yield f"note: {worker.name} runs release {worker.release}"


def pair_lines(found: admin_service_pb2.GetClusterStatusResponse) -> Iterator[str]:
    """How KV goes from each prefill worker to each decode worker, and why not otherwise."""
    for worker in found.workers:
        for pair in worker.pairs:
            reason = f" ({pair.reason})" if pair.reason else ""
            yield f"{worker.name} -> {pair.worker}: {pair.transport or 'no KV'}{reason}"


def routing_lines(routing: admin_service_pb2.RoutingStatus) -> Iterator[str]:
    """How requests are placed, and how far off the router's predictions are."""
    yield (
        f"placement {routing.placement}: {routing.num_remote} prompts computed by prefill workers, "
        f"{routing.num_local} by decode workers, mean regret {routing.mean_regret_ms:.1f} ms"
    )
    errors = {
        "prefill": routing.prefill_error_p90,
        "decode steps": routing.step_error_p90,
        "what remains of transfers": routing.transfer_error_p90,
    }
    # Nothing measured is no perfection.
    shown = [f"{100 * error:.0f} % of {kind}" for kind, error in errors.items() if error]
    if shown:
        yield f"90 % of predictions are within {', '.join(shown)}"
    expected = ""
    if routing.expected_output_tokens:
        expected = f", answers are expected to have at most {routing.expected_output_tokens} tokens"
    yield f"{routing.num_prefix_keys} cached blocks indexed, {routing.num_shed} requests shed{expected}"


def _buckets_table(found: admin_service_pb2.GetClusterStatusResponse) -> Table:
    table = Table("bucket", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for title in ("waiting", "tokens waiting", "dispatched"):
        table.add_column(title, justify="right")
    for bucket in found.buckets:
        table.add_row(
            bucket.label,
            str(bucket.num_waiting),
            str(bucket.num_waiting_tokens),
            str(bucket.num_dispatched),
        )
    return table


def _fields(message: Any) -> dict[str, Any]:
    """The fields of a message that are no messages themselves."""
    return {
        field.name: getattr(message, field.name)
        for field in message.DESCRIPTOR.fields
        if field.message_type is None
    }
