from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.errors import ConfigError
from router.offline.policy import Fleet, LinePolicy, Place
from router.offline.recorded_costs import RecordedCosts
from router.offline.recording import Outcome, RecordedRequest, RecordedWorker
from router.offline.simple_policies import LeastTokens
from router.offline.simulated_fleet import SimulatedFleet
from tests.router.offline.recordings import COSTS, decode, prefill, request


class AtTheDecodeWorker(LinePolicy):
    name = "local"

    def choose(self, request: RecordedRequest, fleet: Fleet) -> Place | None:
        return fleet.decodes[0], fleet.decodes[0]


def run(
    workers: Sequence[RecordedWorker],
    requests: Sequence[RecordedRequest],
    policy: LinePolicy | None = None,
    costs: dict[tuple[str, str], tuple[float, ...]] = COSTS,
) -> list[Outcome]:
    return SimulatedFleet(workers, RecordedCosts(costs)).run(requests, policy or LeastTokens())


def ttfts(outcomes: list[Outcome]) -> list[float | None]:
    return [outcome.ttft_ms for outcome in outcomes]


def test_a_prompt_takes_its_chunks_and_its_answer_the_transfer_and_the_steps() -> None:
    # 300 tokens in chunks of 128, 128 and 44: 10 + 300 ms. The next two tokens: 5 ms of transfer, then two
    # steps of 20 + 2 ms.
    (outcome,) = run([prefill(), decode()], [request(1, 0.0, 300, 3)])
    assert outcome.ttft_ms == pytest.approx(310)
    assert outcome.itl_ms == pytest.approx((5 + 22 + 22) / 2)
    assert (outcome.compute_ms, outcome.num_computed_tokens) == (pytest.approx(310), 300)
    assert (outcome.prefill_worker, outcome.decode_worker) == ("prefill-0", "decode-0")


def test_attention_costs_the_same_in_chunks_as_in_one() -> None:
    costs = COSTS | {("prefill", ""): (0.0, 0.0, 0.01)}
    # 0.01 n (n/2) with n = 300.
    assert ttfts(run([prefill(), decode()], [request(1, 0.0, 300)], costs=costs)) == [pytest.approx(450)]


def test_a_short_prompt_passes_a_long_one_that_is_under_way() -> None:
    # Steps of the long one: 138 ms, then at 138 ms both: of 256 tokens the oldest is promised 128, and the
    # short one fits beside: 128 + 10 + 50 ms. So the short one is done at 326 ms.
    outcomes = run([prefill(), decode()], [request(1, 0.0, 512), request(2, 0.1, 50)])
    # The long one: 326 ms and two more chunks of 128 ms.
    assert ttfts(outcomes) == [pytest.approx(326 + 256), pytest.approx(226)]


def test_the_oldest_prompt_advances_by_half_of_a_step_under_a_stream_of_short_ones() -> None:
    # Both arrive at once; a step has 100 tokens. The long one is promised 50; the short one gets 50 of its
    # 60: 10 + 50 + 10 + 50 ms. In the next it needs only 10, so that the long one gets 90: 100 ms.
    worker = prefill(max_batch_tokens=100)
    outcomes = run([worker, decode()], [request(1, 0.0, 200), request(2, 0.0, 60)])
    assert ttfts(outcomes)[1] == pytest.approx(220)
    # 60 tokens are left to the long one.
    assert ttfts(outcomes)[0] == pytest.approx(280)


def test_prompts_that_come_together_share_a_step() -> None:
    outcomes = run([prefill(), decode()], [request(1, 0.0, 100), request(2, 0.0, 100)])
    assert ttfts(outcomes) == [pytest.approx(220), pytest.approx(220)]
    # Half of the step is each one's.
    assert [outcome.compute_ms for outcome in outcomes] == [pytest.approx(110), pytest.approx(110)]


def test_a_cached_prefix_is_not_computed_again() -> None:
    blocks = range(1, 7)
    first, second = run(
        [prefill(), decode()], [request(1, 0.0, 100, blocks=blocks), request(2, 1.0, 100, blocks=blocks)]
    )
    # Six blocks of 16 tokens are 96 of them.
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 96)
    assert second.ttft_ms == pytest.approx(10 + 4)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    blocks = range(1, 7)
    outcomes = run(
        [prefill(), decode()], [request(1, 0.0, 96, blocks=blocks), request(2, 1.0, 96, blocks=blocks)]
    )
    assert outcomes[1].num_cached_tokens == 80


def test_what_was_used_least_recently_leaves_the_cache_first() -> None:
    worker = prefill(num_blocks=8)
    one, other = range(1, 5), range(11, 15)
    again, third = range(1, 5), range(21, 25)
    outcomes = run(
        [worker, decode()],
        [
            request(1, 0.0, 65, blocks=one),
            request(2, 1.0, 65, blocks=other),
            request(3, 2.0, 65, blocks=again),
            request(4, 3.0, 65, blocks=third),
            request(5, 4.0, 65, blocks=other),
            request(6, 5.0, 65, blocks=third),
        ],
    )
    assert [outcome.num_cached_tokens for outcome in outcomes] == [0, 0, 64, 0, 0, 64]


def test_a_prompt_waits_for_its_blocks_until_another_has_left() -> None:
    # 8 blocks hold one prompt of 100 tokens, until its KV has arrived: 110 ms and 5 ms of transfer.
    worker = prefill(num_blocks=8)
    outcomes = run([worker, decode()], [request(1, 0.0, 100, 2), request(2, 0.0, 100, 2)])
    assert ttfts(outcomes) == [pytest.approx(110), pytest.approx(115 + 110)]


def test_a_request_is_not_placed_before_its_decode_worker_has_room() -> None:
    # 8 blocks hold one request of 100 + 20 tokens: the second is placed when the first has ended.
    worker = decode(num_blocks=8)
    first, second = run([prefill(), worker], [request(1, 0.0, 100, 20), request(2, 0.0, 100, 20)])
    ended_ms = 110 + 5 + 19 * 22
    assert first.ttft_ms == pytest.approx(110)
    assert second.ttft_ms == pytest.approx(ended_ms + 110)


def test_tokens_of_one_step_come_together() -> None:
    # Both are there at 225 ms (two prompts in one step, then 5 ms); each step of two takes 24 ms.
    outcomes = run([prefill(), decode()], [request(1, 0.0, 100, 3), request(2, 0.0, 100, 3)])
    assert [outcome.itl_ms for outcome in outcomes] == [pytest.approx((5 + 24 + 24) / 2)] * 2


def test_a_prompt_computed_where_others_decode_takes_mixed_steps() -> None:
    # The first is computed alone, 10 + 10 ms. Its first step then begins at 20 ms and takes 22. The second,
    # which came at 21 ms, joins at 42 ms: 64 tokens of 100 beside one decoding request take 20 + 2 + 32 ms,
    # then 36 tokens 20 + 2 + 18 ms.
    outcomes = run(
        [prefill(), decode()], [request(1, 0.0, 10, 50), request(2, 0.021, 100, 1)], AtTheDecodeWorker()
    )
    assert outcomes[0].ttft_ms == pytest.approx(20)
    assert outcomes[1].ttft_ms == pytest.approx(42 + 54 + 40 - 21)
    assert outcomes[1].prefill_worker == "decode-0"


def test_no_more_run_than_there_are_seats() -> None:
    worker = decode(max_running=1)
    first, second = run([prefill(), worker], [request(1, 0.0, 100, 11), request(2, 0.0, 100, 2)])
    # Both arrive at 225 ms; the second's step begins when the first has had ten of 22 ms.
    assert first.itl_ms == pytest.approx((5 + 220) / 10)
    assert second.itl_ms == pytest.approx(5 + 220 + 22)


def test_what_the_decode_worker_holds_does_not_travel() -> None:
    costs = COSTS | {("transfer", ""): (0.0, 1.0)}
    blocks = range(1, 7)
    requests = [request(1, 0.0, 96, 2, blocks=blocks), request(2, 1.0, 96, 2, blocks=blocks)]
    first, second = run([prefill(), decode()], requests, costs=costs)
    assert (first.itl_ms, second.itl_ms) == (pytest.approx(96 + 22), pytest.approx(22))


def test_a_worker_has_its_own_costs_where_they_are_known() -> None:
    costs = COSTS | {("prefill", "prefill-1"): (0.0, 3.0, 0.0)}
    workers = [prefill("prefill-0"), prefill("prefill-1"), decode()]
    outcomes = run(workers, [request(1, 0.0, 100), request(2, 0.0, 100)], costs=costs)
    assert [(o.prefill_worker, round(o.ttft_ms or 0)) for o in outcomes] == [
        ("prefill-0", 110),
        ("prefill-1", 300),
    ]


def test_what_fits_nowhere_is_named() -> None:
    with pytest.raises(ConfigError, match="1 of 2 requests fit nowhere, the first has 100 prompt tokens"):
        run([prefill(), decode(num_blocks=4)], [request(1, 0.0, 10, 2), request(2, 0.0, 100, 2)])
