"""What a chaos run may strike: there is always a way left, and every kind has its turn."""

from __future__ import annotations

import random

import pytest

from benchmarks.chaos.census import name_of
from benchmarks.chaos.decks import greater, leave_a_way, lesser


def dead(*names: str) -> set[tuple[str, str]]:
    return {(name, name) for name in names}


@pytest.mark.parametrize(
    "broken",
    [
        set(),
        dead("prefill-0", "decode-1", "router-0"),
        {("prefill-0", "decode-0"), ("prefill-1", "decode-1")},
        {("router-0", "prefill-0"), ("router-1", "prefill-1")},
        # A router that nobody reaches needs no workers.
        {("client", "router-0"), ("router-0", "decode-0"), ("router-0", "decode-1")},
    ],
)
def test_a_way_is_left(broken: set[tuple[str, str]]) -> None:
    assert leave_a_way(broken)


@pytest.mark.parametrize(
    "broken",
    [
        dead("prefill-0", "prefill-1"),
        dead("decode-0", "decode-1"),
        dead("router-0", "router-1"),
        dead("router-0") | {("client", "router-1")},
        dead("prefill-0") | {("prefill-1", "decode-0"), ("router-1", "decode-1")},
        {("router-0", "decode-0"), ("router-0", "decode-1")},
    ],
)
def test_no_way_is_left(broken: set[tuple[str, str]]) -> None:
    assert not leave_a_way(broken)


def test_the_same_seed_deals_the_same_faults() -> None:
    deals = [[fault.kind for fault in lesser(ray=True)(random.Random(seed))] for seed in (1, 1, 2)]
    assert deals[0] == deals[1] != deals[2]


def test_a_deck_has_every_kind_of_fault() -> None:
    kinds = {fault.kind for fault in lesser(ray=True)(random.Random(1))}
    assert {"redis killed", "redis stopped 5 s", "stop router 0.5 s", "stop decode 11 s"} <= kinds
    assert {"cut client->router", "hole 11 s prefill->decode", "drip router->decode"} <= kinds
    assert any(kind.startswith("gcs stopped") for kind in kinds)
    of_role = {fault.kind for fault in lesser(ray=False, links=False)(random.Random(1))}
    assert of_role == {f"stop {r} {s} s" for r in ("router", "prefill", "decode") for s in ("0.5", "3", "11")}


def test_each_link_and_each_role_has_its_turn_before_any_has_a_second() -> None:
    kinds = [fault.kind for fault in lesser(ray=True)(random.Random(7))]
    links = {f"{a}->{b}" for a, b in (("client", "router"), ("router", "prefill"), ("router", "decode"))}
    roles = {"stop router", "stop prefill", "stop decode"}
    first = {
        " ".join(kind.split()[:2]) if kind.startswith("stop") else kind.split()[-1] for kind in kinds[:7]
    }
    assert first == links | roles | {"prefill->decode"}


def test_each_role_is_killed_before_any_is_killed_again() -> None:
    kinds = [fault.kind for fault in greater(is_scaled=True)(random.Random(5))]
    assert set(kinds[:3]) == {"kill router", "kill prefill", "kill decode"}
    assert set(kinds[3:6]) == {"restart router", "restart prefill", "restart decode"}
    assert sum(kind.startswith("scale") for kind in kinds) == 1


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["/usr/bin/python3", "-m", "router", "--name=router-1", "--port=1"], "router-1"),
        (["python", "-m", "baton.pool", "--decode=2"], "pool"),
        (["/opt/redis/redis-server 127.0.0.1:7000", ""], "redis"),
        (["/x/ray/core/src/ray/gcs/gcs_server", "--log_dir=/tmp"], "gcs"),
        (["python", "-m", "pytest", "--name=decode-0"], ""),
        (["python", "-m"], ""),
        ([], ""),
    ],
)
def test_processes_are_known_by_their_command_lines(command: list[str], name: str) -> None:
    assert name_of(command) == name
