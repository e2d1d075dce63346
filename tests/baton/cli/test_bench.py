"""`baton bench` against a router that answers at once."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

# What the router of these tests answers: three words, a token each.
THREE = ("--output-tokens", "3", "--input-tokens", "5")


def test_a_closed_loop_reports_json(baton, router) -> None:
    options = ["--requests", "6", "--concurrency", "2", "--warm-up", "1", "--slo", "ttft=60s", "--seed", "5"]
    ran = baton("bench", "--address", router.address, *THREE, *options, "--json", "-")
    assert ran.code == 0
    found = json.loads(ran.out)
    figures = found["figures"]
    assert (found["model"], found["settings"]["seed"]) == ("tiny", 5)
    assert (figures["num_requests"], figures["num_complete"], figures["num_met"]) == (6, 6, 6)
    assert figures["errors"] == {}
    assert 0 < figures["ttft_ms"]["p50"] <= figures["e2e_ms"]["p99"]
    assert figures["output_tokens_per_s"] == pytest.approx(3 * figures["requests_per_s"])
    assert figures["goodput_requests_per_s"] == pytest.approx(figures["requests_per_s"])
    # The warm-up comes on top, and asks something else.
    assert len({tuple(request.token_ids.ids) for request in router.requests}) == 7
    assert all(request.ignore_eos and request.max_tokens == 3 for request in router.requests)


def test_people_get_tables_and_the_file_has_each_request(baton, router, tmp_path) -> None:
    file = tmp_path / "run.json"
    options = ["--rate", "200", "--requests", "5", "--warm-up", "0", "--json", str(file), "--details"]
    ran = baton("bench", "--address", router.address, *THREE, *options)
    assert ran.code == 0
    assert "5 of 5 requests answered" in ran.out
    for name in ("TTFT", "ITL", "E2E", "p99", "output tokens/s"):
        assert name in ran.out
    requests = json.loads(file.read_text())["requests"]
    assert [len(request["token_s"]) for request in requests] == [3] * 5


def test_a_trace_is_replayed(baton, router, tmp_path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 1000 * n, "input_length": 4 + n, "output_length": 3} for n in range(4)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    options = ["--trace", str(trace), "--speed", "100", "--warm-up", "0", "--json", "-"]
    found = json.loads(baton("bench", "--address", router.address, *options).out)
    assert found["figures"]["num_complete"] == 4
    assert sorted(len(request.token_ids.ids) for request in router.requests) == [4, 5, 6, 7]
    # Three seconds of the trace, a hundred times as fast.
    assert found["figures"]["duration_s"] >= 0.03


def test_failures_are_reported_and_nothing_answered_is_exit_code_1(baton, router) -> None:
    router.breaks_off = True
    ran = baton("bench", "--address", router.address, *THREE, "--requests", "2", "--warm-up", "0")
    assert ran.code == 1
    assert "0 of 2 requests answered" in ran.out
    assert "2 failed with UNAVAILABLE: the worker is lost" in ran.out


def test_a_picture_is_drawn(baton, router, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "run.svg"
    options = ["--requests", "4", "--warm-up", "0", "--slo", "ttft=50", "--plot", str(picture)]
    assert baton("bench", "--address", router.address, *THREE, *options).code == 0
    text = picture.read_text()
    assert text.count('id="axes_') == 4
    assert "</svg>" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rate", "1", "--trace", "t"], "'--rate' / '--trace'"),
        (["--slo", "ttft"], "is no objective"),
        (["--input-tokens", "x"], "is no length"),
        (["--token-ids", "9-3"], "is no range of token ids"),
        (["--trace", "/no/such/trace.jsonl"], "No such file"),
        (["--door", "http", "--url", "ftp://a"], "is no URL of a server"),
    ],
)
def test_wrong_usage_is_exit_code_2(baton, options, message) -> None:
    ran = baton("bench", *options)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err


def test_without_matplotlib_a_picture_is_refused_before_anything_is_sent(baton, router, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = baton("bench", "--address", router.address, "--plot", str(Path("x.svg")))
    assert ran.code == 2
    assert "pip install matplotlib" in ran.err
    assert router.requests == []


@pytest.mark.parametrize("door", [["--address", "127.0.0.1:1"], ["--door", "http", "--url", "127.0.0.1:1"]])
def test_nothing_there_is_exit_code_3(baton, monkeypatch, door) -> None:
    monkeypatch.setattr("baton.cli.bench_doors.CONNECT_S", 0.2)
    ran = baton("bench", *door)
    assert (ran.code, ran.out) == (3, "")


def test_a_key_does_not_go_to_another_machine_by_http_in_plain_text(baton, monkeypatch) -> None:
    monkeypatch.setenv("BATON_API_KEY", "0123456789abcdef")
    ran = baton("bench", "--door", "http", "--url", "http://192.0.2.1:8000")
    assert ran.code == 2
    assert "would cross the network to 192.0.2.1:8000 in plain text" in ran.err
    assert "0123456789abcdef" not in ran.err


def test_ctrl_c_reports_what_there_is(baton, router) -> None:
    # The end of each answer is held back, so the run would not end.
    router.hold = threading.Event()
    real = router.words

    class Words(list):
        def __iter__(self):
            if len(router.requests) == 3:
                os.kill(os.getpid(), signal.SIGINT)
            elif len(router.requests) < 3:
                router.hold.set()
            return super().__iter__()

    router.words = Words(real)
    options = ["--requests", "50", "--concurrency", "1", "--warm-up", "0"]
    ran = baton("bench", "--address", router.address, *THREE, *options)
    router.hold.set()
    assert ran.code == 130
    assert "2 of 2 requests answered" in ran.out
    assert "interrupted" in ran.err


@pytest.mark.parametrize(
    ("options", "flag", "why"),
    [
        (["--rate", "1", "--concurrency", "3"], "--concurrency", "is for a closed loop"),
        (["--door", "http", "--address", "a:1"], "--address", "--door http takes --url"),
        (["--url", "http://a:1"], "--url", "is for --door http"),
        (["--speed", "2"], "--speed", "is for --trace"),
        (["--max-in-flight", "2"], "--max-in-flight", "is for --rate and --trace"),
        (["--details"], "--details", "is for --json"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(baton, options, flag, why) -> None:
    ran = baton("bench", *options)
    assert ran.code == 2
    assert f"'{flag}': {why}" in ran.err or (f"'{flag}'" in ran.err and why in ran.err)


def test_a_variable_that_would_do_nothing_is_for_other_commands(baton, router, monkeypatch) -> None:
    monkeypatch.setenv("BATON_URL", "http://127.0.0.1:1")
    options = ["--requests", "1", "--warm-up", "0", "--rate", "100", "--json", "-"]
    ran = baton("bench", "--address", router.address, *THREE, *options)
    assert ran.code == 0
    settings = json.loads(ran.out)["settings"]
    assert (settings["rate"], settings["concurrency"]) == (100, None)


@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_a_file_that_cannot_be_written_is_found_before_the_run(baton, router, tmp_path, flag) -> None:
    if flag == "--plot":
        pytest.importorskip("matplotlib")
    ran = baton("bench", "--address", router.address, flag, str(tmp_path / "none" / "run.svg"))
    assert ran.code == 2
    assert f"'{flag}'" in ran.err
    assert router.requests == []
