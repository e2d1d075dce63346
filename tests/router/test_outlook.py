"""What a router learns of workers and traffic, and when it forgets it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from baton.prefix_keys import KEY_BYTES
from baton.v1 import common_pb2, decode_service_pb2
from router.learning import learned_edges
from router.outlook import REVIEW_S, STALE_S
from tests.fakes import until
from tests.router.acting import Company, Manners, virtually
from tests.router.stage import Stage, staged

KEY = bytes(range(KEY_BYTES))
CHANGES = common_pb2.CacheChanges(reset=True, stored=KEY)


def links(stage: Stage) -> tuple[Any, Any]:
    return stage.fleet.prefill_links()[0], stage.fleet.decode_links()[0]


async def test_an_answer_is_expected_to_store_all_but_its_last_token() -> None:
    async with staged(output_quantile=0.9) as stage:
        outlook = stage.core.outlook
        # Nothing is known of answers.
        assert outlook.expected_tokens(100, 0, 50) == 100 + 50 - 1
        for _ in range(100):
            outlook.answered(50, 10)
        assert outlook.expected_tokens(100, 0, 50) == 100 + 10 - 1
        # It is longer than those are, and may end any moment or not before its limit.
        assert 100 + 11 <= outlook.expected_tokens(100, 12, 50) <= 100 + 49


async def test_without_a_quantile_no_growth_is_expected() -> None:
    async with staged(output_quantile=0.0) as stage:
        outlook = stage.core.outlook
        outlook.answered(50, 10)
        assert outlook.expected_tokens(100, 7, 50) == 107


async def test_what_a_worker_has_cached_is_known_until_its_session_ends() -> None:
    async with staged() as stage:
        prefill, decode = await stage.prefill(), await stage.decode()
        prefill.send(cache_changes=CHANGES)
        decode.send(cache_changes=CHANGES)
        prefixes = stage.core.outlook.prefixes
        await until(lambda: prefixes.num_keys == 2)
        holders = {link.incarnation for link in stage.fleet.links}
        assert set(prefixes._holders) == holders
        stage.dialer.cut("prefill-0")
        await until(lambda: prefixes.num_keys == 1)
        stage.kill("decode-0")
        await until(lambda: prefixes.num_keys == 0)
        assert not prefixes._masks


async def test_a_worker_whose_report_cannot_be_true_loses_its_session() -> None:
    async with staged() as stage:
        prefill = await stage.prefill()
        # Its first report is no complete list.
        prefill.send(cache_changes=common_pb2.CacheChanges(stored=KEY))
        await until(lambda: prefill.num_sessions == 2)
        assert stage.core.outlook.prefixes.num_keys == 0


async def test_only_a_prefill_workers_time_for_a_prompt_teaches_what_prompts_cost() -> None:
    async with staged() as stage:
        await stage.prefill()
        await stage.decode()
        prefill, decode = links(stage)
        outlook = stage.core.outlook
        before = outlook.costs.prefill_ms(prefill.incarnation, 100, 0)
        times = common_pb2.PrefillTimes(total_ms=9000.0, compute_ms=9000.0, num_computed_tokens=100)
        for _ in range(50):
            # A decode worker's steps say it; and a prompt of which no token was sampled says nothing.
            outlook.computed(decode, times)
            outlook.computed(prefill, common_pb2.PrefillTimes(compute_ms=9000.0, num_computed_tokens=100))
        assert outlook.costs.prefill_ms(prefill.incarnation, 100, 0) == before
        for _ in range(50):
            outlook.computed(prefill, times)
        assert outlook.costs.prefill_ms(prefill.incarnation, 100, 0) == pytest.approx(9000.0, rel=0.3)


def test_a_worker_that_was_slow_once_counts_as_typical_when_it_was_idle_for_long() -> None:
    async def main() -> None:
        async with staged() as stage:
            company = Company(stage, Manners())
            for number in range(2):
                await company.prefill(f"prefill-{number}")
                await company.decode(f"decode-{number}")
            outlook = stage.core.outlook
            slow, other = stage.fleet.decode_links()

            def step(link: Any, duration_ms: float) -> None:
                load = decode_service_pb2.StepLoad(
                    num_decoding=1, num_context_tokens=100, duration_ms=duration_ms
                )
                outlook.stepped(link, load)

            for _ in range(100):
                step(slow, 900.0)
                step(other, 10.0)
            assert outlook.costs.step_ms(slow.incarnation, 1, 100) > 400.0
            await asyncio.sleep(STALE_S / 2)
            outlook.review(stage.fleet.prefill_links(), stage.fleet.decode_links())
            assert outlook.costs.step_ms(slow.incarnation, 1, 100) > 400.0
            await asyncio.sleep(STALE_S)
            # The other one is asked all the time.
            step(other, 10.0)
            outlook.review(stage.fleet.prefill_links(), stage.fleet.decode_links())
            fleet = outlook.costs.step_ms(0, 1, 100)
            assert outlook.costs.step_ms(slow.incarnation, 1, 100) == pytest.approx(fleet)

    virtually(main())


def test_edges_that_are_learned_are_looked_at_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned_edges, "MIN_PROMPTS", 64)

    async def main() -> None:
        async with staged(learn_buckets=True) as stage:
            await stage.prefill()
            outlook = stage.core.outlook
            await asyncio.sleep(REVIEW_S)
            assert outlook.review(stage.fleet.prefill_links(), []) == (128, 256, 512)
            for number in range(512):
                # All are short: the edges of everybody's work are far above theirs.
                outlook.queued(0, 20 + number % 80, 1.0)
            assert outlook.review(stage.fleet.prefill_links(), []) is None
            await asyncio.sleep(REVIEW_S)
            edges = outlook.review(stage.fleet.prefill_links(), [])
            assert edges is not None
            # Equal work in four buckets of lengths that are spread evenly from 20 to 99.
            assert edges == pytest.approx((40, 60, 80), abs=4)

    virtually(main())


async def test_edges_that_are_set_stay() -> None:
    async with staged() as stage:
        await stage.prefill()
        outlook = stage.core.outlook
        for _ in range(600):
            outlook.queued(0, 20, 1.0)
        assert outlook.review(stage.fleet.prefill_links(), []) is None


async def test_a_bucket_is_nearest_to_the_workers_that_are_dealt_to_it() -> None:
    async with staged() as stage:
        for number in range(4):
            await stage.prefill(f"prefill-{number}")
        await stage.decode()
        outlook = stage.core.outlook
        # Half of the work is in the shortest bucket, half in the longest.
        for bucket in (0, 3):
            outlook.queued(bucket, 100, 500.0)
        await stage.prefill("prefill-4")
        outlook.review(list(stage.fleet.prefill_links()), stage.fleet.decode_links())
        incarnations = [link.incarnation for link in stage.fleet.prefill_links()]
        near_short = [outlook.distance(0, worker) for worker in incarnations]
        near_long = [outlook.distance(3, worker) for worker in incarnations]
        assert {(short, long) for short, long in zip(near_short, near_long, strict=True)} == {(0, 3), (3, 0)}


async def test_the_last_costs_in_the_log_are_those_of_every_worker(tmp_path) -> None:
    path = tmp_path / "decisions.jsonl"
    async with staged(decision_log=str(path)) as stage:
        await stage.prefill()
        await stage.decode()
        stage.dialer.cut("prefill-0")
        stage.dialer.cut("decode-0")
        await until(lambda: not any(link.is_ready for link in stage.fleet.links))
        # A router that stops has lost its sessions before it closes its log.
        stage.core.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    last = [record for record in records if record["kind"] == "costs"]
    assert {(record["of"], record["worker"]) for record in last} >= {
        ("prefill", ""),
        ("prefill", "prefill-0"),
        ("step", "decode-0"),
    }
