"""The verdict on a soak: a process that died, a ledger that is not zero and growth are complaints."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.chaos.load import Case, Load, Mix
from benchmarks.process_watch import Sample
from benchmarks.soak import Growth, Soak

MIX = Mix(cases=[Case(prompt=(1,), max_tokens=2)], token_ids=range(3, 9), num_clients=1)
ZERO = {"router-0": {"streams": 0}}


def sample(at: float, rss_mib: float, num_fds: int = 9) -> Sample:
    return Sample(at=at, pid=1, rss_mib=rss_mib, num_fds=num_fds, num_threads=2)


def test_a_soak_is_passed_only_if_nothing_died_leaked_or_grew() -> None:
    calm = Growth.of("router-0", [sample(0, 50), sample(200, 51)], [sample(at, 51) for at in (10, 100, 180)])
    passed = Soak(growths=[calm], deaths=[], before=ZERO, after=ZERO, load=Load({}, MIX, seed=1))
    assert passed.complaints == []
    assert replace(passed, deaths=["decode-0 has been processes [4, 5]"]).complaints == [
        "decode-0 has been processes [4, 5]"
    ]
    held = {"router-0": {"streams": 1}}
    # What was held before and after alike is no zero either.
    assert len(replace(passed, before=held, after=held).complaints) == 1
    assert len(replace(passed, after=held).complaints) == 1
    # From 60 s on 2 MiB in a minute, and five descriptors more.
    grown = Growth.of(
        "router-0", [sample(0, 50), sample(200, 51, 14)], [sample(0, 50), sample(60, 50), sample(120, 52)]
    )
    assert [words.split()[1] for words in replace(passed, growths=[grown]).complaints] == ["grows", "had"]
