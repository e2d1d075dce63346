"""What is said while a cluster starts, from logs written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.cluster.start_news import INTERVAL_S, StartNews

WAITING = frozenset({"prefill-0", "decode-0"})
PLAIN = "waiting for decode-0, prefill-0"


def tell(logs: Path, name: str, event: str, **fields: object) -> None:
    with (logs / f"{name}.log").open("a") as log:
        log.write(json.dumps({"event": event, "role": name, **fields}) + "\n")


def loads(logs: Path, name: str, percent: int) -> None:
    tell(logs, name, "loading weights", percent=percent)


@pytest.fixture
def news(tmp_path: Path) -> StartNews:
    return StartNews(tmp_path, 0.0)


def test_each_change_of_who_is_waited_for_is_told_once(news: StartNews) -> None:
    waiting = [WAITING, WAITING, frozenset({"prefill-0"}), frozenset({"prefill-0"}), frozenset[str]()]
    said = [news.line(names, 0.1 * i) for i, names in enumerate(waiting)]
    assert said == [PLAIN, "", "waiting for prefill-0", "", ""]


def test_loading_is_told_when_it_takes_long_and_again_when_it_has_come_further(
    news: StartNews, tmp_path: Path
) -> None:
    assert news.line(WAITING, 0.0) == PLAIN
    loads(tmp_path, "prefill-0", 12)
    assert news.line(WAITING, INTERVAL_S - 0.1) == ""
    assert news.line(WAITING, INTERVAL_S) == f"{PLAIN} (loading weights, 12 %)"
    loads(tmp_path, "prefill-0", 25)
    loads(tmp_path, "decode-0", 7)
    assert news.line(WAITING, INTERVAL_S + 0.1) == ""
    both = "waiting for decode-0 (loading weights, 7 %), prefill-0 (loading weights, 25 %)"
    assert news.line(WAITING, 2 * INTERVAL_S) == both
    assert news.line(WAITING, 3 * INTERVAL_S) == ""


def test_what_a_library_writes_behind_it_does_not_hide_it(news: StartNews, tmp_path: Path) -> None:
    loads(tmp_path, "prefill-0", 37)
    with (tmp_path / "prefill-0.log").open("a") as log:
        log.write('a warning\n[1, 2]\n"text"\n{"not": "ours"}\n{"event": "loading wei')
    assert news.line(WAITING, INTERVAL_S) == f"{PLAIN} (loading weights, 37 %)"


def test_a_worker_that_has_loaded_is_only_waited_for(news: StartNews, tmp_path: Path) -> None:
    loads(tmp_path, "prefill-0", 99)
    tell(tmp_path, "prefill-0", "weights loaded", seconds=9.5)
    assert news.line(WAITING, INTERVAL_S) == PLAIN


def test_a_worker_that_compiles_says_so(news: StartNews, tmp_path: Path) -> None:
    tell(tmp_path, "prefill-0", "compiling layers")
    assert news.line(WAITING, INTERVAL_S) == f"{PLAIN} (compiling layers)"


def test_an_earlier_run_in_the_same_folder_is_not_told(tmp_path: Path) -> None:
    loads(tmp_path, "prefill-0", 60)
    news = StartNews(tmp_path, 0.0)
    assert news.line(WAITING, INTERVAL_S) == PLAIN
    loads(tmp_path, "prefill-0", 5)
    assert news.line(WAITING, 2 * INTERVAL_S) == f"{PLAIN} (loading weights, 5 %)"


def test_a_long_log_is_read_from_its_end(news: StartNews, tmp_path: Path) -> None:
    tell(tmp_path, "decode-0", "configuration", settings="x" * 10_000)
    loads(tmp_path, "decode-0", 80)
    assert news.line(WAITING, INTERVAL_S) == "waiting for decode-0 (loading weights, 80 %), prefill-0"
