from __future__ import annotations

import io

import pytest
from rich.console import Console

from baton.answer import Choice, Summary, Timings, TransferTimes
from baton.cli.demo import PROMPTS, timings_table
from baton.cli.demo_streams import DemoStreams
from baton.route_explain import RouteExplain
from baton.v1 import route_explain_pb2


def summary(bucket: str, decode_worker: str) -> Summary:
    timings = Timings(
        bucket=bucket,
        prefill_worker="prefill-0",
        decode_worker=decode_worker,
        queue_ms=1.25,
        reserve_ms=2.0,
        prefill_ms=12030.04,
        transfer_ms=4000.0,
        transfer_bytes=15_500_000,
        ttft_ms=12033.3,
        itl_ms=5.5,
        total_ms=99.0,
        num_attempts=1,
        num_preemptions=0,
        num_handovers=0,
        num_outgrown=0,
        transfer_tail_ms=1004.0,
        transfer_times=TransferTimes(
            open_ms=1.0,
            wait_ms=0.0,
            prepare_ms=900.0,
            wire_ms=2000.0,
            verify_ms=300.0,
            convert_ms=700.0,
            commit_ms=5.0,
        ),
        transfer_hidden_share=0.75,
    )
    return Summary(
        request_id="r",
        model="m",
        choices=(Choice(index=0, finish_reason="length", num_output_tokens=8, matched_stop=""),),
        num_prompt_tokens=42,
        num_output_tokens=8,
        num_cached_tokens=0,
        seed=1,
        timings=timings,
        explain=RouteExplain.from_proto(route_explain_pb2.RouteExplain()),
    )


def test_a_row_per_request_fits_eighty_columns() -> None:
    text = io.StringIO()
    Console(file=text, width=80).print(
        timings_table([summary("<128", "decode-0"), summary(">=512", "decode-1")])
    )
    rows = [line.split() for line in text.getvalue().splitlines() if "42" in line]
    assert rows == [
        ["<128", "42", "1.2", "2.0", "12030", "4000", "1004", "15.5", "12033", "5.5", "8"],
        [">=512", "42", "1.2", "2.0", "12030", "4000", "1004", "15.5", "12033", "5.5", "8"],
    ]


def test_without_a_terminal_answers_are_printed_whole_in_the_order_they_end() -> None:
    text = io.StringIO()
    with DemoStreams(["one", "two"], Console(file=text, force_terminal=False)) as streams:
        streams.add(0, "first [b]")
        streams.add(1, "second")
        streams.finish(1)
        streams.add(0, " answer")
        streams.finish(0)
    assert text.getvalue() == "[two]\nsecond\n\n[one]\nfirst [b] answer\n\n"


def test_on_a_terminal_all_answers_are_visible_at_once() -> None:
    text = io.StringIO()
    with DemoStreams(["one", "two"], Console(file=text, force_terminal=True, width=60)) as streams:
        streams.add(0, "first [b]")
        streams.add(1, "second")
    last_frame = text.getvalue().rsplit("one", 1)[1]
    assert "first [b]" in last_frame
    assert "second" in last_frame


@pytest.mark.parametrize(("index", "least", "most"), [(0, 0, 60), (1, 480, 1000), (2, 2400, 6000)])
def test_the_prompts_have_three_clearly_different_lengths(index, least, most) -> None:
    # An English token is four to five characters long: these land in <128, 128-255 and >=512 tokens.
    assert least <= len(PROMPTS[index][1]) <= most
