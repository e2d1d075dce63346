from __future__ import annotations

import random
from collections import Counter

import pytest

from router.offline.recorded_costs import RecordedCosts
from router.offline.simple_policies import Fifo, LeastTokens, Random, RoundRobin, StaticBuckets
from router.offline.simulated_fleet import SimulatedFleet
from router.replay import POLICIES, outcomes_under, replay
from tests.router.offline.recordings import COSTS, decode, prefill, recording, request

PREFILLS = [prefill(f"prefill-{index}") for index in range(4)]


def computed_by(policy, requests, prefills=PREFILLS) -> list[str]:
    outcomes = SimulatedFleet([*prefills, decode()], RecordedCosts(COSTS)).run(requests, policy)
    return [outcome.prefill_worker for outcome in outcomes]


def conversations(num_groups: int, turns: int, seed: int) -> list:
    """Prompts of 528 tokens in groups that share their first 512, in random order, 20 ms apart."""
    groups = [group for group in range(num_groups) for _ in range(turns)]
    random.Random(seed).shuffle(groups)
    return [
        request(
            number, 0.02 * number, 528, 2, blocks=[*range(100 * group, 100 * group + 32), 10_000 + number]
        )
        for number, group in enumerate(groups, start=1)
    ]


def test_round_robin_takes_turns() -> None:
    names = computed_by(RoundRobin(), [request(number, 0.0, 50) for number in range(1, 6)])
    assert names == ["prefill-0", "prefill-1", "prefill-2", "prefill-3", "prefill-0"]


def test_random_reaches_everybody_and_repeats_with_its_seed() -> None:
    requests = [request(number, 0.0, 50) for number in range(1, 101)]
    names = computed_by(Random(random.Random(3)), requests)
    assert names == computed_by(Random(random.Random(3)), requests)
    assert set(names) == {worker.name for worker in PREFILLS}


def test_least_tokens_goes_where_least_is_to_be_computed() -> None:
    requests = [request(1, 0.0, 500), request(2, 0.0, 100), request(3, 0.0, 50), request(4, 0.0, 60)]
    assert computed_by(LeastTokens(), requests, PREFILLS[:2]) == [
        *("prefill-0", "prefill-1", "prefill-1", "prefill-1")
    ]


def test_static_buckets_give_each_length_its_workers() -> None:
    requests = [request(1, 0.0, 100), request(2, 0.0, 128), request(3, 0.0, 300), request(4, 0.0, 600)]
    policy = StaticBuckets((128, 256, 512))
    assert computed_by(policy, requests) == ["prefill-0", "prefill-1", "prefill-2", "prefill-3"]


def test_static_buckets_of_few_workers_share_the_last() -> None:
    requests = [request(1, 0.0, 100), request(2, 0.0, 300), request(3, 0.0, 600)]
    names = computed_by(StaticBuckets((128, 256, 512)), requests, PREFILLS[:2])
    assert names == ["prefill-0", "prefill-1", "prefill-1"]


def test_under_fifo_nobody_overtakes_the_head_that_waits_for_credit() -> None:
    # The second prompt has no credit beside the first; the short one behind it could go, and must wait.
    requests = [request(1, 0.0, 3000), request(2, 0.0, 3000), request(3, 0.0, 10)]
    fifo = SimulatedFleet([PREFILLS[0], decode()], RecordedCosts(COSTS)).run(requests, Fifo())
    free = SimulatedFleet([PREFILLS[0], decode()], RecordedCosts(COSTS)).run(requests, LeastTokens())
    # Credit for 3000 of 4096 tokens is there when 1904 of the first 3000 are computed.
    assert fifo[2].ttft_ms > 1904
    assert free[2].ttft_ms < 300


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_serves_everybody(name: str) -> None:
    rng = random.Random(1)
    requests = [
        request(number, 0.05 * number, rng.choice([20, 200, 900]), rng.randrange(1, 9))
        for number in range(1, 101)
    ]
    made = recording([*PREFILLS[:2], decode(), decode("decode-1")], requests)
    outcomes = outcomes_under(name, made)
    assert [outcome.request.number for outcome in outcomes] == list(range(1, 101))
    assert all(outcome.ttft_ms is not None and outcome.ttft_ms > 0 for outcome in outcomes)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_fleet_without_prefill_workers_computes_where_it_decodes(name: str) -> None:
    made = recording([decode(), decode("decode-1")], [request(1, 0.0, 50, 2)], placement="colocated")
    (outcome,) = outcomes_under(name, made)
    assert outcome.prefill_worker == outcome.decode_worker


def test_cost_beats_round_robin_where_prompts_share_prefixes() -> None:
    # 528 ms a prompt would be 26 times what one worker can do; computed once per group, it is easy.
    made = recording(
        [*PREFILLS, decode()], conversations(num_groups=8, turns=25, seed=5), placement="disaggregated"
    )
    cost, turns = (outcomes_under(name, made) for name in ("cost", "round-robin"))
    computed = [sum(outcome.num_computed_tokens for outcome in outcomes) for outcomes in (cost, turns)]
    # At best 8 prompts whole and 16 tokens of each of the 192 others: 7296. Round-robin computes each group
    # once at each of four workers at least.
    assert computed[0] < 0.6 * computed[1]
    figures = replay(made, ["cost", "round-robin"])
    assert figures[0].ttft_ms[">=512"][50] < figures[1].ttft_ms[">=512"][50]


def test_cost_spreads_a_burst_of_equal_prompts_evenly() -> None:
    requests = [request(number, 0.0, 90) for number in range(1, 41)]
    made = recording([*PREFILLS, decode()], requests, placement="disaggregated")
    counts = Counter(outcome.prefill_worker for outcome in outcomes_under("cost", made))
    assert set(counts.values()) == {10}


def test_short_prompts_wait_less_under_cost_than_in_order_of_arrival() -> None:
    # Each second one prompt of 2000 tokens and eight of 40 for two workers that compute 1000 tokens a second:
    # more than they can do in order, so that the line grows.
    requests = [
        request(9 * second + index, second + 0.1 * index, 2000 if index == 0 else 40, objective_ms=6000)
        for second in range(20)
        for index in range(9)
    ]
    made = recording([*PREFILLS[:2], decode()], requests, placement="disaggregated")
    cost, fifo = replay(made, ["cost", "fifo"])
    assert cost.ttft_ms["<128"][90] < 0.5 * fifo.ttft_ms["<128"][90]


def test_static_buckets_are_less_balanced_than_cost() -> None:
    # Nearly all of the work is in one range, and takes three of four workers.
    requests = [request(number, 0.1 * number, 600 if number % 2 else 20) for number in range(1, 61)]
    made = recording([*PREFILLS, decode()], requests, placement="disaggregated")
    cost, static = replay(made, ["cost", "static-buckets"])
    assert static.balance > 3.5
    assert cost.balance < 1.5


def test_auto_computes_short_prompts_at_an_idle_decode_worker_while_prefill_workers_are_busy() -> None:
    # Apart, so that the decode worker is idle each time.
    requests = [request(1, 0.0, 4000), *(request(number, 0.5 * number, 30, 2) for number in range(2, 5))]
    costs = COSTS | {("step", ""): (20.0, 2.0, 0.0, 0.5)}
    busy = recording([PREFILLS[0], decode()], requests, costs=costs)
    forced = recording([PREFILLS[0], decode()], requests, costs=costs, placement="disaggregated")
    chosen = {outcome.prefill_worker for outcome in outcomes_under("cost", busy)[1:]}
    assert chosen == {"decode-0"}
    assert {o.prefill_worker for o in outcomes_under("cost", forced)} == {"prefill-0"}
