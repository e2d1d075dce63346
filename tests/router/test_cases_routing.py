"""Cases of scheduling and routing that have gone wrong elsewhere, at the router, in simulated time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from baton.errors import BatonError, DeadlineExceeded
from baton.v1 import common_pb2
from router import generation
from router.decode_link import DecodeLink
from router.placing.credit import KEPT_SHARE
from router.prefill_link import PrefillLink
from tests.cluster import cluster
from tests.fakes import until
from tests.router.acting import Company, Manners, virtually
from tests.router.stage import Run, Stage, info_of, staged
from tests.router.test_dispatcher_kicks import assign, result, turns


def counters(stage: Stage) -> dict[str, list[int]]:
    """Everything that is counted of requests, by worker."""
    found: dict[str, list[int]] = {"queue": [len(stage.queue), sum(stage.queue._num_tokens)]}
    for link in stage.fleet.links:
        if isinstance(link, PrefillLink):
            backlog = link._backlog
            counts = [link.spent, backlog.num_blocks, backlog.num_tokens, len(backlog._prompts)]
        else:
            assert isinstance(link, DecodeLink)
            own = link._own
            counts = [sum(link._asked.values()), len(own), own.num_tokens, own.num_growth_blocks]
            counts += [own.num_local_tokens, own.num_decoding, own.num_decoding_tokens]
        found[link.name] = [link.num_attempts, *counts]
    return found


async def ends(run: Run) -> str:
    """How a request ended."""
    await asyncio.wait([run.task])
    if run.task.cancelled():
        return "cancelled"
    error = run.task.exception()
    if error is None:
        return "finished"
    assert isinstance(error, BatonError), error
    return error.code


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Looks at the counters of a link after whatever it hears or is told; what was negative."""
    wrong: list[str] = []

    def looked_at(kind: type[Any], name: str) -> None:
        plain = getattr(kind, name)

        def watching(self: Any, *args: Any, **options: Any) -> Any:
            answer = plain(self, *args, **options)
            if isinstance(self, PrefillLink):
                counts = [self.credit, self.spent, self._backlog.num_blocks, self._backlog.num_tokens]
            else:
                own = self._own
                counts = [own.num_tokens, own.num_growth_blocks, own.num_local_tokens, own.num_decoding]
                counts += [own.num_decoding_tokens, *self._asked.values()]
            if min(counts, default=0) < 0:
                wrong.append(f"{self.name} after {name}: {counts}")
            return answer

        monkeypatch.setattr(kind, name, watching)

    for kind in (PrefillLink, DecodeLink):
        for name in ("_receive", "detach", "_lose"):
            looked_at(kind, name)
    looked_at(PrefillLink, "take")
    looked_at(PrefillLink, "give_back")
    looked_at(DecodeLink, "place")
    return wrong


@pytest.mark.parametrize("mode", ["disaggregated", "auto", "colocated"])
def test_b13_after_a_thousand_ends_of_all_kinds_every_counter_is_zero_and_none_was_negative(
    mode: str, watched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "FIRST_PAUSE_S", 0.02)

    async def main() -> tuple[Counter[str], int, int]:
        rng = random.Random(13)
        manners = Manners(rng=random.Random(14), refuses=0.1, fails=0.15, gives_way=0.1)
        async with staged(placement=mode, max_queue=1000, max_wait_s=5.0) as stage:
            company = Company(stage, manners)
            for number in range(3):
                await company.prefill(f"prefill-{number}", budget=1000, num_blocks=100)
                await company.decode(f"decode-{number}", num_blocks=200)
            ending, timelines = [], []
            for _ in range(1000):
                await asyncio.sleep(rng.expovariate(50))
                run = stage.generate(
                    num_prompt_tokens=rng.randrange(1, 400),
                    max_tokens=rng.randrange(1, 30),
                    timeout_s=rng.uniform(0.05, 2.0) if rng.random() < 0.2 else None,
                )
                if rng.random() < 0.2:
                    asyncio.get_running_loop().call_later(rng.uniform(0, 1.0), run.task.cancel)
                if rng.random() < 0.02:
                    stage.dialer.cut(f"{rng.choice(('prefill', 'decode'))}-{rng.randrange(3)}")
                ending.append(asyncio.create_task(ends(run)))
                timelines.append(run.generation._timeline)
            outcomes = Counter([await task for task in ending])
            links = [link for link in stage.fleet.links if isinstance(link, PrefillLink)]
            # What was cancelled last is still to be said goodbye to.
            await until(lambda: all(link.credit == 1000 for link in links if link.is_ready))
            await until(lambda: not any(any(counts) for counts in counters(stage).values()))
            num_retried = sum(timeline.num_attempts > 1 for timeline in timelines)
            return outcomes, num_retried, sum(timeline.num_preemptions > 0 for timeline in timelines)

    outcomes, num_retried, num_gave_way = virtually(main())
    assert watched == []
    assert sum(outcomes.values()) == 1000
    assert outcomes["finished"] > 300
    assert min(outcomes["cancelled"], outcomes["DEADLINE_EXCEEDED"]) > 15
    # Others failed for good, or went on after a failure, and after giving way.
    assert min(num_retried, num_gave_way) > 20


def test_b13_requests_on_one_worker_are_seen_there_for_as_long_as_they_run() -> None:
    async def main() -> None:
        async with staged() as stage:
            company = Company(stage, Manners(step_s=0.5))
            await company.prefill("prefill-0", budget=100_000)
            await company.decode("decode-0", num_blocks=1000)
            streams = [stage.generate(num_prompt_tokens=20, max_tokens=40) for _ in range(20)]
            await until(lambda: all(run.received() for run in streams))
            for name in ("decode-1", "decode-2"):
                await company.decode(name, num_blocks=1000)
            for _ in range(15):
                await asyncio.sleep(0.25)
                links = {link.name: link.num_decoding for link in stage.fleet.decode_links()}
                assert links == {"decode-0": 20, "decode-1": 0, "decode-2": 0}
            before = len(company.decodes[2].reserved)
            short = [stage.generate(num_prompt_tokens=20, max_tokens=2) for _ in range(30)]
            for run in short:
                assert await ends(run) == "finished"
            assert len(company.decodes[2].reserved) == before == 20

    virtually(main())


def test_b15_small_requests_pass_a_head_that_needs_more_blocks_and_it_starts_within_the_bound() -> None:
    async def main() -> float:
        async with staged(max_wait_s=5.0, max_queue=10_000, output_quantile=0.0) as stage:
            company = Company(stage, Manners(step_s=0.05))
            await company.prefill("prefill-0", budget=100_000)
            # Ten answers hold 30 of 40 blocks. When they have ended, some 16 small ones hold one each: 30 are
            # never free at once.
            await company.decode("decode-0", num_blocks=40)
            for number in range(10):
                stage.generate(num_prompt_tokens=40, max_tokens=5 + number)
            await turns(50)
            loop = asyncio.get_running_loop()
            large = stage.generate(num_prompt_tokens=470, max_tokens=2)
            started_at, passed = loop.time(), 0
            small: list[Run] = []
            while not large.received():
                small.append(stage.generate(num_prompt_tokens=10, max_tokens=5))
                await asyncio.sleep(1 / 64)
                passed = sum(run.task.done() for run in small)
                assert loop.time() - started_at < 20
            waited_s = loop.time() - started_at
            assert passed > 200
            for run in small:
                run.task.cancel()
            return waited_s

    waited_s = virtually(main())
    # At the bound nothing more is admitted; what runs ends within its five steps, and its own prompt is
    # computed.
    assert 5.0 < waited_s < 5.0 + 5 * 0.05 + 0.2


def test_b16_requests_whose_kv_stalls_do_not_keep_the_next_ones_out() -> None:
    async def main() -> None:
        async with cluster(output_quantile=0.0) as c:
            decode: Any = c.workers["decode-0"]
            scheduler = decode._engine.scheduler
            scheduler.config = replace(scheduler.config, max_running=8)
            stalled = c.network.may_commit
            stalled.clear()
            parked = [c.stage.generate(num_prompt_tokens=8, max_tokens=4, timeout_s=1.5) for _ in range(8)]
            await until(lambda: c.network.num_commits_waiting == 8)
            # Commits of those that come now are not held back.
            c.network.may_commit = asyncio.Event()
            c.network.may_commit.set()
            started_at = asyncio.get_running_loop().time()
            for run in [c.stage.generate(num_prompt_tokens=8, max_tokens=4) for _ in range(8)]:
                assert await run.answer() == c.expected(run)
            assert asyncio.get_running_loop().time() - started_at < 1.0
            assert not any(run.task.done() for run in parked)
            for run in parked:
                await asyncio.wait([run.task])
                assert isinstance(run.task.exception(), DeadlineExceeded)
            assert asyncio.get_running_loop().time() - started_at < 1.6
            await c.idle()

    virtually(main())


def test_b17_a_worker_that_drains_gets_nothing_more_and_ends_what_it_has() -> None:
    async def main() -> None:
        async with staged() as stage:
            company = Company(stage)
            await company.prefill("prefill-0", budget=100_000)
            leaving = await company.decode("decode-0", num_blocks=1000)
            await company.decode("decode-1", num_blocks=1000)
            before = [stage.generate(max_tokens=50) for _ in range(10)]
            await until(lambda: all(len(run.received()) > 2 for run in before))
            num_reserved = len(leaving.reserved)
            assert num_reserved == 5
            # Its session stays as it is.
            stage.registry.announce(info_of(leaving, "decode", draining=True))
            await turns()
            after = [stage.generate(max_tokens=5) for _ in range(10)]
            for run in (*before, *after):
                assert await ends(run) == "finished"
            assert len(leaving.reserved) == num_reserved
            assert all(run.generation._timeline.num_attempts == 1 for run in before)

    virtually(main())


def test_b17_while_workers_join_and_leave_every_request_has_an_outcome() -> None:
    num_requests, apart_s = 300, 1 / 20

    async def main() -> tuple[Counter[str], Counter[int]]:
        rng, drained = random.Random(17), dict[str, float]()
        async with staged(max_queue=1000, max_wait_s=5.0) as stage:
            company = Company(stage, Manners(step_s=0.03))
            await company.prefill("prefill-0", budget=10_000)
            present = [await company.decode(f"decode-{number}", num_blocks=300) for number in range(5)]

            async def churn() -> None:
                for number in range(5, 15):
                    await asyncio.sleep(num_requests * apart_s / 12)
                    leaving = present.pop(rng.randrange(len(present)))
                    name = leaving.identity.name
                    stage.registry.announce(info_of(leaving, "decode", draining=True))
                    await turns()
                    drained[name] = asyncio.get_running_loop().time()
                    present.append(await company.decode(f"decode-{number}", num_blocks=300))
                    # Half of them are not given the time to end what they have.
                    await asyncio.sleep(rng.choice((0.05, 1.5)))
                    stage.kill(name)

            churning = asyncio.create_task(churn())
            runs = []
            for _ in range(num_requests):
                runs.append(
                    stage.generate(num_prompt_tokens=rng.randrange(1, 300), max_tokens=rng.randrange(2, 30))
                )
                await asyncio.sleep(apart_s)
            await churning
            async with asyncio.timeout(30):
                outcomes = Counter([await ends(run) for run in runs])
            for worker in company.decodes.values():
                late = [at for at, _ in worker.reserved if at > drained.get(worker.identity.name, 1e9)]
                assert not late, f"{worker.identity.name} was asked after it said that it leaves"
            assert not any(any(counts) for counts in counters(stage).values())
            assert len(drained) == 10
            return outcomes, Counter(run.generation._timeline.num_attempts for run in runs)

    outcomes, attempts = virtually(main())
    assert outcomes == {"finished": num_requests}
    # Some were in the middle of it when their worker was killed; none more than a few times.
    assert attempts[1] < num_requests
    assert max(attempts) <= 3


async def spread_of(stage: Stage, count: int) -> tuple[Counter[str], Counter[str]]:
    """How many of equal requests that come at once each worker gets, by role."""
    assignments = [await result(task) for task in [assign(stage, 100) for _ in range(count)]]
    return (
        Counter(assignment.prefill.name for assignment in assignments if assignment.prefill),
        Counter(assignment.decode.name for assignment in assignments),
    )


async def four_of_each(stage: Stage) -> None:
    for number in range(4):
        await stage.prefill(f"prefill-{number}", budget=4096)
        await stage.decode(f"decode-{number}", num_blocks=1000)


@pytest.mark.parametrize("seed", range(20))
def test_b18_a_burst_that_comes_between_two_reports_spreads_over_equal_workers(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        async with AsyncExitStack() as stack:
            first, second = [await stack.enter_async_context(staged()) for _ in range(2)]
            for stage in (first, second):
                stage.dispatcher._placement._rng = random.Random(rng.getrandbits(64))
                await four_of_each(stage)
            # One router: ten each.
            alone = await spread_of(first, 40)
            assert [sorted(counts.values()) for counts in alone] == [[10] * 4, [10] * 4]
            # Two, neither of which has heard of the other's, with 40 between them.
            count = rng.randrange(1, 40)
            shares = [await spread_of(first, count), await spread_of(second, 40 - count)]
            for role, kind in enumerate(("prefill", "decode")):
                counts = [sum(share[role][f"{kind}-{number}"] for share in shares) for number in range(4)]
                assert sum(counts) == 40
                assert max(counts) - min(counts) <= 2

    virtually(main())


def test_b18_ties_are_not_broken_by_the_order_of_a_list() -> None:
    async def main() -> set[str]:
        firsts = set()
        for seed in range(12):
            async with staged() as stage:
                stage.dispatcher._placement._rng = random.Random(seed)
                await four_of_each(stage)
                firsts |= set((await spread_of(stage, 1))[1])
        return firsts

    assert virtually(main()) == {f"decode-{number}" for number in range(4)}


def test_b19_links_that_are_cut_at_once_are_not_dialled_again_in_step() -> None:
    """20 links, whose workers are away for 30 s: as after a switch has failed."""

    async def main() -> tuple[list[tuple[float, str]], float]:
        async with staged() as stage:
            company = Company(stage)
            workers = [await company.decode(f"decode-{number}") for number in range(20)]
            loop, dials = asyncio.get_running_loop(), list[tuple[float, str]]()
            cut_at, plain = loop.time(), stage.dialer.open

            def noted(info: Any) -> Any:
                dials.append((loop.time() - cut_at, info.name))
                return plain(info)

            stage.dialer.open = noted  # type: ignore[method-assign]
            for worker in workers:
                stage.cut_off(worker.identity.name)
            await asyncio.sleep(30)
            for worker in workers:
                stage.dialer.workers[worker.identity.name] = worker.serve
            back_at = loop.time()
            await until(lambda: len(stage.fleet.decode_links()) == 20)
            return dials, loop.time() - back_at

    dials, recovery_s = virtually(main())
    # The second dials and later ones of the first five seconds, when pauses are short.
    by_link = {name: [at for at, dialled in dials if dialled == name] for _, name in dials}
    later = [at for times in by_link.values() for at in times[1:] if at < 5]
    assert len(by_link) == 20
    assert max(sum(start <= at < start + 0.05 for at in later) for start in later) <= 0.1 * len(later)
    # After the first few a pause is a second on average.
    assert len(dials) <= 20 * 45
    # A pause is 2 s at most.
    assert recovery_s <= 2.1


@pytest.mark.parametrize("num_long", [1, 5])
async def test_long_prompts_leave_credit_to_a_short_one(num_long: int) -> None:
    async with staged() as stage:
        prefill = await stage.prefill(budget=4096)
        await stage.decode(num_blocks=100_000)
        stage.fleet.prefill_links()[0]._capacity.num_blocks = 100_000
        long = [assign(stage, 60_000) for _ in range(num_long)]
        await turns()
        assert [task.done() for task in long] == [True] + [False] * (num_long - 1)
        assert long[0].result().cost == 4096 - 4096 * KEPT_SHARE
        short = await result(assign(stage, 101))
        assert (short.bucket, short.cost) == ("<128", 101)
        # The worker, not the router, has it now: it takes the shortest first.
        assert short.prefill is long[0].result().prefill
        assert prefill.commands.empty()


async def test_an_answer_that_is_complete_when_it_comes_ends_well() -> None:
    async with staged() as stage:
        run = stage.generate(num_prompt_tokens=20)
        # Its client has all of it, and its router was lost with the summary.
        run.generation.finish_reason = common_pb2.FINISH_REASON_LENGTH
        await asyncio.wait([run.task])
        explain = run.generation._timeline.report()
        assert (explain.outcome, len(explain.attempts)) == ("OK", 0)
        assert explain.HasField("ended_at_ms")
