from __future__ import annotations

import json

import pytest

NOT_UTF_8 = b"caf\xe9".decode("utf-8", "surrogateescape")


def test_the_answer_goes_to_standard_output_and_the_timings_to_standard_error(baton, router) -> None:
    ran = baton("generate", "The capital", "--address", router.address, "--verbose")
    assert (ran.code, ran.out) == (0, "Paris is it.\n")
    assert "7 prompt tokens, 3 generated, stop, seed 42" in ran.err
    assert "TTFT 12.5 ms" in ran.err
    assert router.requests[0].text == "The capital"


def test_without_verbose_standard_error_is_silent(baton, router) -> None:
    assert baton("generate", "x", "--address", router.address).err == ""


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_answer_that_breaks_off_ends_its_line_before_the_error(baton, router, command) -> None:
    router.breaks_off = True
    ran = baton(command, "x", "--address", router.address)
    assert (ran.code, ran.out) == (3, "Paris is it.\n")
    assert ran.err.startswith("error: the worker is lost")


def test_options_arrive(baton, router) -> None:
    options = ["--max-tokens", "9", "--temperature", "0.5", "--top-k", "3", "--top-p", "0.25"]
    options += ["--min-p", "0.125", "--seed", "18446744073709551615", "--ignore-eos"]
    assert baton("generate", "x", "--address", router.address, *options).code == 0
    (request,) = router.requests
    assert (request.max_tokens, request.temperature, request.top_k) == (9, 0.5, 3)
    assert (request.top_p, request.min_p, request.seed) == (0.25, 0.125, 2**64 - 1)
    assert request.ignore_eos


def test_what_is_not_given_is_left_to_the_router(baton, router) -> None:
    baton("generate", "x", "--address", router.address)
    (request,) = router.requests
    absent = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
    assert not [name for name in absent if request.HasField(name)]


def test_json_holds_text_token_ids_and_summary(baton, router) -> None:
    ran = baton("generate", "x", "--address", router.address, "--json")
    answer = json.loads(ran.out)
    assert answer["text"] == "Paris is it."
    assert answer["token_ids"] == [100, 101, 102]
    assert answer["summary"]["finish_reason"] == "stop"
    assert answer["summary"]["timings"]["prefill_worker"] == "prefill-0"


def test_a_dash_reads_standard_input(baton, router) -> None:
    assert baton("generate", "-", "--address", router.address, stdin="naïve 😀\n".encode()).code == 0
    assert router.requests[0].text == "naïve 😀\n"


@pytest.mark.parametrize("written", ["1,2,3", "1 2 3", "1, 2, 3"])
def test_token_ids(baton, router, written) -> None:
    assert baton("generate", written, "--token-ids", "--address", router.address).code == 0
    assert list(router.requests[0].token_ids.ids) == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        ([NOT_UTF_8], None, "'PROMPT': it is not valid UTF-8 at character 3"),
        (["-"], b"ab\xff", "'PROMPT': standard input is not valid UTF-8 at byte 2"),
        ([""], None, "'PROMPT': it is empty"),
        (["-"], b"", "'PROMPT': it is empty"),
        (["1 two", "--token-ids"], None, "'PROMPT': not token ids"),
        (["x", "--seed", "-1"], None, "seed"),
        (["1 -2", "--token-ids"], None, "token_ids"),
    ],
    ids=["bytes", "stdin-bytes", "empty", "empty-stdin", "words-as-ids", "seed", "negative-id"],
)
def test_wrong_input_is_exit_code_2_and_names_the_argument(baton, router, arguments, stdin, message) -> None:
    ran = baton("generate", *arguments, "--address", router.address, stdin=stdin)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert router.requests == []


def test_nobody_there_is_exit_code_3(baton, monkeypatch) -> None:
    monkeypatch.setattr("baton.cli.generate.CONNECT_S", 0.2)
    ran = baton("generate", "x", "--address", "127.0.0.1:1")
    assert (ran.code, ran.out) == (3, "")
    assert "no router answers at 127.0.0.1:1" in ran.err
    assert "baton up" in ran.err
