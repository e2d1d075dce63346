from __future__ import annotations

import json

import pytest

from baton.v1 import admin_service_pb2, common_pb2


@pytest.fixture
def cluster(router):
    router.status = admin_service_pb2.GetClusterStatusResponse(
        router="router-0",
        model="tiny",
        num_requests=4,
        dashboard_url="http://127.0.0.1:8265",
        workers=[
            admin_service_pb2.WorkerStatus(
                name="decode-0",
                role=common_pb2.ROLE_DECODE,
                address="127.0.0.1:4001",
                state="ready",
                num_free_blocks=700,
                num_blocks=728,
                block_size=16,
                num_running=3,
                kv_dtype="bfloat16",
                pid=1234,
            ),
            admin_service_pb2.WorkerStatus(
                name="prefill-0",
                role=common_pb2.ROLE_PREFILL,
                address="127.0.0.1:4002",
                state="refused",
                reason="num_layers differs [30 != 31]",
                credit_tokens=4096,
                pid=1235,
                pairs=[
                    admin_service_pb2.PairState(worker="decode-0", transport="shm"),
                    admin_service_pb2.PairState(
                        worker="decode-1", transport="grpc", reason="[/dev/shm] of another host"
                    ),
                    admin_service_pb2.PairState(worker="decode-2", reason="num_layers differs"),
                ],
            ),
        ],
        buckets=[
            admin_service_pb2.BucketStatus(
                label="<128", num_waiting=2, num_waiting_tokens=90, num_dispatched=17
            )
        ],
        routing=admin_service_pb2.RoutingStatus(
            placement="auto",
            prefill_error_p90=0.25,
            step_error_p90=0.04,
            transfer_error_p90=0.3,
            num_remote=31,
            num_local=12,
            mean_regret_ms=1.5,
            num_shed=5,
            num_prefix_keys=640,
            expected_output_tokens=90,
        ),
    )
    return router


def rows_of(out: str) -> dict[str, list[str]]:
    """Rows of the tables by their first cell."""
    return {line.split()[0]: line.split() for line in out.splitlines() if line.split() and "->" not in line}


def test_the_tables_show_workers_and_buckets(baton, cluster) -> None:
    ran = baton("status", "--address", cluster.address)
    assert ran.code == 0
    rows = rows_of(ran.out)
    assert rows["decode-0"][1:] == [
        *("decode", "ready", "127.0.0.1:4001", "bfloat16", "700", "728", "16", "3", "0", "-")
    ]
    assert "refused: num_layers differs [30 != 31]" in ran.out
    assert rows["prefill-0"][-1] == "4096"
    assert rows["<128"][1:] == ["2", "90", "17"]
    assert "model tiny, router-0, requests in flight: 4" in ran.out
    assert "http://127.0.0.1:8265" in ran.out


@pytest.mark.parametrize("columns", [40, 80])
def test_a_narrow_terminal_cuts_nothing_short(baton, cluster, columns) -> None:
    ran = baton("status", "--address", cluster.address, columns=columns)
    assert "…" not in ran.out
    rows = rows_of(ran.out)
    assert rows["decode-0"][3:8] == ["127.0.0.1:4001", "bfloat16", "700", "728", "16"]


def test_a_worker_of_another_release_is_noted(baton, cluster) -> None:
    cluster.status.release = "0.2.0"
    for worker, release in zip(cluster.status.workers, ("0.1.0", "0.2.0"), strict=True):
        worker.release = release
    out = baton("status", "--address", cluster.address).out
    assert "router-0 (release 0.2.0), requests" in out
    assert [line for line in out.splitlines() if "runs release" in line] == [
        "note: decode-0 runs release 0.1.0"
    ]


def test_json_holds_every_field_with_numbers_as_numbers(baton, cluster) -> None:
    shown = json.loads(baton("status", "--json", "--address", cluster.address).out)
    decode, prefill = shown["workers"]
    names = {field.name for field in admin_service_pb2.WorkerStatus.DESCRIPTOR.fields}
    assert set(decode) == set(prefill) == names
    assert (decode["role"], decode["num_free_blocks"], decode["credit_tokens"]) == ("decode", 700, 0)
    assert (prefill["role"], prefill["credit_tokens"]) == ("prefill", 4096)
    assert shown["buckets"] == [
        {"label": "<128", "num_waiting": 2, "num_waiting_tokens": 90, "num_dispatched": 17}
    ]
    assert (shown["model"], shown["router"], shown["num_requests"]) == ("tiny", "router-0", 4)


def test_a_line_per_pair_comes_between_the_tables(baton, cluster) -> None:
    lines = baton("status", "--address", cluster.address).out.splitlines()
    first = lines.index("prefill-0 -> decode-0: shm")
    assert lines[first + 1 : first + 3] == [
        "prefill-0 -> decode-1: grpc ([/dev/shm] of another host)",
        "prefill-0 -> decode-2: no KV (num_layers differs)",
    ]
    starts = [line.split()[0] for line in lines if line.split()]
    assert starts.index("worker") < starts.index("prefill-0") < starts.index("bucket")
    assert next(place for place, line in enumerate(lines) if line.startswith("bucket")) > first


def test_pairs_are_objects_in_json(baton, cluster) -> None:
    decode, prefill = json.loads(baton("status", "--json", "--address", cluster.address).out)["workers"]
    assert decode["pairs"] == []
    assert prefill["pairs"] == [
        {"worker": "decode-0", "transport": "shm", "reason": "", "code": ""},
        {"worker": "decode-1", "transport": "grpc", "reason": "[/dev/shm] of another host", "code": ""},
        {"worker": "decode-2", "transport": "", "reason": "num_layers differs", "code": ""},
    ]


def test_how_requests_are_placed_comes_after_the_buckets(baton, cluster) -> None:
    lines = baton("status", "--address", cluster.address).out.splitlines()
    first = lines.index(
        "placement auto: 31 prompts computed by prefill workers, 12 by decode workers, mean regret 1.5 ms"
    )
    assert lines[first + 1 : first + 3] == [
        "90 % of predictions are within 25 % of prefill, 4 % of decode steps, "
        "30 % of what remains of transfers",
        "640 cached blocks indexed, 5 requests shed, answers are expected to have at most 90 tokens",
    ]
    assert next(place for place, line in enumerate(lines) if line.startswith("<128")) < first


def test_routing_is_an_object_in_json(baton, cluster) -> None:
    routing = json.loads(baton("status", "--json", "--address", cluster.address).out)["routing"]
    names = {field.name for field in admin_service_pb2.RoutingStatus.DESCRIPTOR.fields}
    assert set(routing) == names
    assert (routing["placement"], routing["num_remote"], routing["num_local"]) == ("auto", 31, 12)
    assert (routing["prefill_error_p90"], routing["expected_output_tokens"]) == (0.25, 90)


def test_nobody_there_is_exit_code_3_with_a_remedy(baton) -> None:
    ran = baton("status", "--address", "127.0.0.1:1")
    assert (ran.code, ran.out) == (3, "")
    assert "127.0.0.1:1" in ran.err
    assert "baton up" in ran.err


def test_a_worker_that_leaves_is_draining_and_says_what_it_still_holds(baton, cluster) -> None:
    cluster.status.workers[0].state = "draining"
    ran = baton("status", "--address", cluster.address)
    row = rows_of(ran.out)["decode-0"]
    assert (row[2], row[-3:]) == ("draining", ["3", "0", "-"])
    assert "note: decode-0" not in ran.out
