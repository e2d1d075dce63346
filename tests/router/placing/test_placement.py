"""Which place is best, with costs that the test states, so that every score can be worked out by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from router.placing.draw import SCAN_ALL
from router.placing.placement import NUM_FINALISTS
from tests.router.places import ANSWER_MS, PROMPT_MS, STEP_MS, Costs, Decode, Prefill, ask, chosen, placement


def test_the_score_is_the_sum_of_its_parts() -> None:
    costs = Costs(tail_ms={(1, 2): 7.0})
    place = chosen(placement(costs).choose(ask(100), [Prefill(1, ahead_ms=30.0)], [Decode(2)], 0.0))
    assert (place.wait_ms, place.prefill_ms, place.transfer_ms) == (30.0, 100.0, 7.0)
    # One answer decodes: this one.
    assert place.itl_ms == STEP_MS + ANSWER_MS
    assert place.score_ms == 30.0 + 100.0 + 7.0 + 11.0
    assert place.ttft_ms == 130.0


def test_a_cached_prefix_is_worth_the_wait_for_it_and_no_more() -> None:
    near, holder = Prefill(1), Prefill(2, ahead_ms=60.0)
    cached = {2: 80}
    rule = placement()
    assert chosen(rule.choose(ask(100, cached=cached), [near, holder], [Decode(3)], 0.0)).prefill is holder
    holder.ahead_ms = 120.0
    assert chosen(rule.choose(ask(100, cached=cached), [near, holder], [Decode(3)], 0.0)).prefill is near


def test_what_other_routers_have_there_counts_half() -> None:
    busy = Prefill(1, num_foreign_tokens=400)
    place = chosen(placement().choose(ask(100), [busy], [Decode(2)], 0.0))
    assert place.wait_ms == 0.5 * 400


def test_a_slow_worker_gets_a_prompt_only_where_the_others_are_that_busy() -> None:
    fast, slow = Prefill(1, ahead_ms=250.0), Prefill(2)
    rule = placement(Costs(slow={2: 4.0}))
    assert chosen(rule.choose(ask(100), [fast, slow], [Decode(3)], 0.0)).prefill is fast
    fast.ahead_ms = 350.0
    assert chosen(rule.choose(ask(100), [fast, slow], [Decode(3)], 0.0)).prefill is slow


def test_a_decode_worker_that_breaks_the_objective_is_taken_only_if_no_other_keeps_it() -> None:
    # 60 answers make a step of 70 ms; the objective is 50.
    crowded, far = Decode(2, num_decoding=60), Decode(3)
    costs = Costs(tail_ms={(1, 3): 100.0})
    rule = placement(costs, itl_objective_ms=50.0)
    # 21 ms too late, for each of ten tokens.
    assert chosen(rule.choose(ask(), [Prefill(1)], [crowded, far], 0.0)).decode is far
    alone = chosen(rule.choose(ask(), [Prefill(1)], [crowded], 0.0))
    assert alone.score_ms == 100.0 + 71.0 + 10 * 21.0


def test_within_the_objective_the_sooner_second_token_decides() -> None:
    crowded, far = Decode(2, num_decoding=60), Decode(3)
    rule = placement(Costs(tail_ms={(1, 3): 100.0}), itl_objective_ms=80.0)
    assert chosen(rule.choose(ask(), [Prefill(1)], [crowded, far], 0.0)).decode is crowded


def test_a_full_batch_costs_half_an_answer() -> None:
    full = Decode(2, num_decoding=4, max_running=4)
    place = chosen(placement().choose(ask(100, num_new=20), [Prefill(1)], [full], 0.0))
    itl_ms = STEP_MS + 5 * ANSWER_MS
    assert place.score_ms == 100.0 + itl_ms + 0.5 * itl_ms * 20


def test_prompts_that_a_decode_worker_computes_slow_some_of_an_answers_steps() -> None:
    # 100 tokens are two steps of at most 64; the answer has ten.
    decode = Decode(2, num_backlog_tokens=100)
    place = chosen(placement().choose(ask(num_new=10), [Prefill(1)], [decode], 0.0))
    assert place.itl_ms == pytest.approx(STEP_MS + ANSWER_MS + 64 * PROMPT_MS * 2 / 10)
    place = chosen(placement().choose(ask(num_new=1), [Prefill(1)], [decode], 0.0))
    assert place.itl_ms == STEP_MS + ANSWER_MS + 64 * PROMPT_MS


@pytest.mark.parametrize("num_workers", [2, 3, 4, 7, SCAN_ALL])
def test_a_burst_of_equal_requests_spreads_to_the_last_one(num_workers: int) -> None:
    prefills = [Prefill(index) for index in range(num_workers)]
    decodes = [Decode(100 + index) for index in range(num_workers)]
    rule, took = placement(seed=num_workers), Counter[int]()
    for _ in range(10 * num_workers):
        decision = rule.choose(ask(100), prefills, decodes, 0.0)
        place = chosen(decision)
        rule.taken(place)
        assert place.prefill is not None
        # As links count what they were given.
        place.prefill.ahead_ms += place.prefill_ms
        place.decode.num_decoding += 1
        took.update([place.prefill.incarnation, place.decode.incarnation])
    assert set(took.values()) == {10}


def test_scores_that_are_nearly_equal_take_turns() -> None:
    # 1 % apart: no prediction is that exact.
    workers = [Prefill(1), Prefill(2)]
    rule, took = placement(Costs(slow={2: 1.01})), Counter[int]()
    for _ in range(20):
        place = chosen(rule.choose(ask(100), workers, [Decode(3)], 0.0))
        rule.taken(place)
        assert place.prefill is not None
        took[place.prefill.incarnation] += 1
    assert took == {1: 10, 2: 10}


def test_routers_begin_with_different_workers() -> None:
    first = set()
    for seed in range(40):
        place = chosen(placement(seed=seed).choose(ask(), [Prefill(i) for i in range(8)], [Decode(9)], 0.0))
        assert place.prefill is not None
        first.add(place.prefill.incarnation)
    assert len(first) == 8


def test_of_equal_places_the_buckets_own_worker_is_taken_and_spills_to_the_neighbour() -> None:
    # Worker i owns bucket i.
    rule = placement(distance=lambda bucket, worker: abs(bucket - worker))
    workers = [Prefill(index) for index in range(4)]
    short, long = ask(100, bucket=0, num_buckets=4), ask(100, bucket=3, num_buckets=4)
    assert chosen(rule.choose(short, workers, [Decode(9)], 0.0)).prefill is workers[0]
    assert chosen(rule.choose(long, workers, [Decode(9)], 0.0)).prefill is workers[3]
    workers[3].ahead_ms = 40.0
    assert chosen(rule.choose(long, workers, [Decode(9)], 0.0)).prefill is workers[2]
    workers[0].why_not = "has no credit"
    assert chosen(rule.choose(short, workers, [Decode(9)], 0.0)).prefill is workers[1]


def test_at_scale_few_are_looked_at_and_the_load_stays_even() -> None:
    prefills = [Prefill(index) for index in range(128)]
    decodes = [Decode(1000 + index) for index in range(128)]
    rule = placement(seed=3)
    looked: list[int] = []
    costs = rule._costs
    assert isinstance(costs, Costs)
    original = costs.prefill_ms

    def counting(worker: int, num_tokens: int, num_cached_tokens: int) -> float:
        looked.append(worker)
        return original(worker, num_tokens, num_cached_tokens)

    costs.prefill_ms = counting  # type: ignore[method-assign]
    for _ in range(128 * 8):
        place = chosen(rule.choose(ask(100), prefills, decodes, 0.0))
        rule.taken(place)
        assert place.prefill is not None
        place.prefill.ahead_ms += 100.0
        place.decode.num_decoding += 1
    assert len(looked) / (128 * 8) <= 10
    # With all of them looked at each would have 8; with one at random the fullest has about 18.
    assert max(p.ahead_ms for p in prefills) <= 1000.0
    assert max(d.num_decoding for d in decodes) <= 10


def test_at_scale_whoever_has_the_prefix_is_always_looked_at() -> None:
    prefills = [Prefill(index) for index in range(100)]
    rule = placement(seed=1)
    for _ in range(50):
        place = chosen(rule.choose(ask(1000, cached={77: 900}), prefills, [Decode(200)], 0.0))
        assert place.prefill is prefills[77]


def test_workers_that_failed_the_request_come_last_whatever_they_score() -> None:
    bad, good = Prefill(1), Prefill(2, ahead_ms=500.0)
    request = ask(avoid=frozenset({1}))
    assert chosen(placement().choose(request, [bad, good], [Decode(3)], 0.0)).prefill is good
    assert chosen(placement().choose(request, [bad], [Decode(3)], 0.0)).prefill is bad


def test_an_open_breaker_excludes_unless_nobody_else_reaches_anybody() -> None:
    broken, sound = Prefill(1, trusted=False), Prefill(2, ahead_ms=500.0)
    assert chosen(placement().choose(ask(), [broken, sound], [Decode(3)], 0.0)).prefill is sound
    # A busy worker is waited for; it is not a reason to go to a broken one.
    sound.why_not = "has no credit"
    assert placement().choose(ask(), [broken, sound], [Decode(3)], 0.0) is None
    sound.unreachable = frozenset({3})
    assert chosen(placement().choose(ask(), [broken, sound], [Decode(3)], 0.0)).prefill is broken


def test_where_the_best_few_do_not_reach_each_other_the_others_are_found() -> None:
    decodes = [Decode(100 + index) for index in range(5)]
    everybody = frozenset(d.incarnation for d in decodes)
    prefills = [Prefill(index, unreachable=everybody) for index in range(5)]
    prefills.append(Prefill(6, ahead_ms=900.0, unreachable=everybody - {104}))
    decodes[4].num_decoding = 50
    place = chosen(placement().choose(ask(), prefills, decodes, 0.0))
    assert (place.prefill, place.decode) == (prefills[5], decodes[4])


def test_who_cannot_take_it_is_named_with_its_reason() -> None:
    full = Decode(3, name="decode-0", why_not="has 2 free blocks, 7 are needed")
    busy = Prefill(1, name="prefill-0", why_not="has credit for 0 tokens, 100 are needed")
    rule = placement()
    assert rule.choose(ask(), [busy, Prefill(2)], [full], 0.0) is None
    decision = rule.choose(ask(), [busy, Prefill(2)], [full, Decode(4)], 0.0)
    assert decision is not None
    assert decision.excluded == (("decode-0", full.why_not), ("prefill-0", busy.why_not))
    assert decision.num_candidates == 4


def test_the_best_places_not_taken_are_kept_best_first() -> None:
    prefills = [Prefill(index, ahead_ms=10.0 * index) for index in range(9)]
    decision = placement().choose(ask(), prefills, [Decode(100), Decode(101, num_decoding=9)], 0.0)
    assert decision is not None
    scores = [other.score_ms for other in decision.others]
    assert scores == sorted(scores)
    # The best few of each role, combined.
    assert len(scores) == NUM_FINALISTS * 2 - 1
    assert decision.chosen.score_ms <= scores[0]


class TestWithoutAPrefillWorker:
    """Places where the decode worker computes the prompt itself."""

    def test_an_idle_decode_worker_takes_a_short_prompt_while_prefill_is_busy(self) -> None:
        place = chosen(
            placement(mode="auto").choose(ask(100), [Prefill(1, ahead_ms=500.0)], [Decode(2)], 0.0)
        )
        assert place.prefill is None
        # One step of 100 prompt tokens, and nobody to wait for.
        assert (place.wait_ms, place.prefill_ms) == (0.0, STEP_MS + 100 * PROMPT_MS)
        assert place.num_held_tokens == 0

    def test_it_has_to_be_clearly_better(self) -> None:
        # Here 60 ms + 11, there 62 + 11: the margin of a tenth decides.
        prefill = Prefill(1)
        rule = placement(Costs(slow={1: 0.62}), mode="auto")
        assert chosen(rule.choose(ask(100), [prefill], [Decode(2)], 0.0)).prefill is prefill
        rule = placement(Costs(slow={1: 0.9}), mode="auto")
        assert chosen(rule.choose(ask(100), [prefill], [Decode(2)], 0.0)).prefill is None

    def test_never_where_its_chunks_break_the_objective(self) -> None:
        busy = Prefill(1, ahead_ms=5000.0)
        # A step with 64 prompt tokens and 20 answers takes 10 + 20 + 32 ms.
        decode = Decode(2, num_decoding=20)
        kept = placement(mode="auto", itl_objective_ms=62.0)
        assert chosen(kept.choose(ask(100), [busy], [decode], 0.0)).prefill is None
        broken = placement(mode="auto", itl_objective_ms=61.0)
        assert chosen(broken.choose(ask(100), [busy], [decode], 0.0)).prefill is busy

    def test_what_it_takes_from_running_answers_counts(self) -> None:
        # Two steps of 62 ms here, of which every answer loses 32 each time: 188 ms in all, against 128 + 50.
        decode = Decode(2, num_decoding=20)
        prefill = Prefill(1, ahead_ms=50.0)
        rule = placement(mode="auto", itl_objective_ms=500.0)
        assert chosen(rule.choose(ask(128), [prefill], [decode], 0.0)).prefill is prefill
        prefill.ahead_ms = 100.0
        place = chosen(rule.choose(ask(128), [prefill], [decode], 0.0))
        assert place.prefill is None
        assert place.prefill_ms == 2 * (STEP_MS + 20 * ANSWER_MS + 64 * PROMPT_MS)

    def test_a_long_prompt_stays_with_the_prefill_worker_unless_its_prefix_is_there(self) -> None:
        busy = Prefill(1, ahead_ms=5000.0)
        rule = placement(mode="auto", local_max_tokens=256)
        assert chosen(rule.choose(ask(2000), [busy], [Decode(2)], 0.0)).prefill is busy
        place = chosen(rule.choose(ask(2000, held={2: 1900}), [busy], [Decode(2)], 0.0))
        assert (place.prefill, place.num_held_tokens) == (None, 1900)
        assert place.prefill_ms == STEP_MS + 100 * PROMPT_MS

    def test_disaggregated_never_does(self) -> None:
        busy = Prefill(1, ahead_ms=5000.0)
        assert chosen(placement().choose(ask(10), [busy], [Decode(2)], 0.0)).prefill is busy
        assert placement().choose(ask(10), [], [Decode(2)], 0.0) is None

    def test_colocated_always_does(self) -> None:
        rule = placement(mode="colocated")
        place = chosen(rule.choose(ask(2000), [Prefill(1)], [Decode(2)], 0.0))
        assert place.prefill is None
        # 16 chunks of at most 128 tokens; nobody decodes.
        assert place.prefill_ms == 16 * (STEP_MS + 128 * PROMPT_MS)

    def test_colocated_goes_to_the_worker_with_the_shortest_backlog(self) -> None:
        rule = placement(mode="colocated")
        crowded, free = Decode(1, num_backlog_tokens=1000), Decode(2)
        assert chosen(rule.choose(ask(100), [], [crowded, free], 0.0)).decode is free

    def test_without_any_prefill_worker_auto_serves_all_the_same(self) -> None:
        rule = placement(mode="auto", itl_objective_ms=1.0)
        assert chosen(rule.choose(ask(2000), [], [Decode(2, num_decoding=5)], 0.0)).prefill is None

    def test_a_prompt_that_no_prefill_worker_can_ever_hold_is_computed_where_it_decodes(self) -> None:
        small = Prefill(1, holds=500)
        rule = placement(mode="auto", local_max_tokens=10)
        assert chosen(rule.choose(ask(501), [small], [Decode(2)], 0.0)).prefill is None
        assert chosen(rule.choose(ask(500), [small], [Decode(2)], 0.0)).prefill is small

    def test_the_whole_prompt_is_never_taken_for_cached(self) -> None:
        place = chosen(placement(mode="colocated").choose(ask(64, held={2: 64}), [], [Decode(2)], 0.0))
        assert place.prefill_ms == STEP_MS + 1 * PROMPT_MS


def test_the_soonest_place_counts_whether_or_not_it_takes_the_prompt_now() -> None:
    rule = placement()
    workers = [Prefill(1, ahead_ms=50.0, why_not="has no credit"), Prefill(2, ahead_ms=90.0)]
    assert rule.soonest_ms(ask(100), workers, [Decode(3)], 0.0) == 150.0
    assert placement(mode="colocated").soonest_ms(ask(100), [], [Decode(3)], 0.0) == STEP_MS + 50.0
