from __future__ import annotations

import json
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from baton.v1 import common_pb2

NOT_UTF_8 = b"caf\xe9".decode("utf-8", "surrogateescape")


def test_the_answer_goes_to_standard_output_and_the_timings_to_standard_error(baton, router) -> None:
    ran = baton("generate", "The capital", "--address", router.address, "--verbose")
    assert (ran.code, ran.out) == (0, "Paris is it.\n")
    assert "7 prompt tokens (0 cached), 3 generated, stop, seed 42" in ran.err
    assert "TTFT 12.5 ms" in ran.err
    assert ran.err.splitlines()[-1] == "more: baton explain req-1"
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


def test_json_holds_the_answers_and_the_summary(baton, router) -> None:
    ran = baton("generate", "x", "--address", router.address, "--json", "-n", "2")
    shown = json.loads(ran.out)
    assert [answer["index"] for answer in shown["answers"]] == [0, 1]
    for answer in shown["answers"]:
        assert answer["text"] == "Paris is it."
        assert answer["token_ids"] == [100, 101, 102]
        assert answer["finish_reason"] == "stop"
    assert shown["summary"]["choices"][1]["num_output_tokens"] == 3
    timings = shown["summary"]["timings"]
    assert (timings["prefill_worker"], timings["transfer_hidden_share"]) == ("prefill-0", 0.75)
    assert timings["transfer_times"] == {
        "open_ms": 1.5,
        "wait_ms": 0.0,
        "prepare_ms": 0.0,
        "wire_ms": 0.0,
        "verify_ms": 0.0,
        "convert_ms": 0.0,
        "commit_ms": 2.5,
    }


def test_several_answers_come_under_their_numbers(baton, router) -> None:
    ran = baton("generate", "x", "--address", router.address, "--n", "2")
    assert (ran.code, ran.out) == (0, "[0] Paris is it.\n[1] Paris is it.\n")


@pytest.mark.parametrize("n", ["1", "2"])
def test_ctrl_c_shows_what_has_come_of_each_answer(baton, router, monkeypatch, n) -> None:
    router.hold = threading.Event()
    flush = sys.stdout.flush

    def interrupt_at_the_first_line_or_word() -> None:
        # By then every answer has its three words: answer 0 ends after them.
        flush()
        if "Paris is it." in sys.stdout.getvalue():
            monkeypatch.setattr(sys.stdout, "flush", flush)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sys.stdout, "flush", interrupt_at_the_first_line_or_word)
    ran = baton("generate", "x", "--address", router.address, "-n", n)
    router.hold.set()
    expected = {"1": "Paris is it.\n", "2": "[0] Paris is it.\n[1] Paris is it.\n"}
    assert (ran.code, ran.out) == (130, expected[n])


def test_what_an_answer_may_be_arrives(baton, router, tmp_path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    options = ["--stop", "a", "--stop", "b", "--include-stop", "--min-tokens", "2", "--top-logprobs", "3"]
    options += ["--repetition-penalty", "1.5", "--presence-penalty", "0.5", "--frequency-penalty", "-0.5"]
    options += ["--logit-bias", "4=-2.5", "--logit-bias", "5=1", "--allowed-token-id", "7"]
    options += ["--stop-token-id", "9", "--keep-special-tokens", "--truncate-prompt", "8"]
    options += ["--prompt-logprobs", "0", "--json", "--json-schema", str(schema)]
    assert baton("generate", "x", "--address", router.address, *options).code == 0
    (request,) = router.requests
    assert (list(request.stop), request.include_stop_in_text) == (["a", "b"], True)
    assert (request.min_tokens, request.logprobs, request.top_logprobs) == (2, True, 3)
    assert request.repetition_penalty == 1.5
    assert (request.presence_penalty, request.frequency_penalty) == (0.5, -0.5)
    assert (dict(request.logit_bias), list(request.allowed_token_ids)) == ({4: -2.5, 5: 1.0}, [7])
    assert (list(request.stop_token_ids), request.truncate_prompt_tokens) == ([9], 8)
    assert request.HasField("skip_special_tokens")
    assert not request.skip_special_tokens
    assert request.HasField("prompt_logprobs")
    assert request.grammar.json_schema == '{"type": "object"}'


def test_what_is_expected_of_the_service_arrives(baton, router) -> None:
    options = ["--priority", "low", "--ttft-objective-ms", "250.5"]
    assert baton("generate", "x", "--address", router.address, *options).code == 0
    (request,) = router.requests
    assert (request.priority, request.ttft_objective_ms) == (common_pb2.PRIORITY_LOW, 250.5)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_key_comes_from_the_environment(baton, router, monkeypatch, command) -> None:
    assert baton(command, "x", "--address", router.address).code == 0
    monkeypatch.setenv("BATON_API_KEY", "0123456789abcdef")
    assert baton(command, "x", "--address", router.address).code == 0
    assert router.authorizations == [None, "Bearer 0123456789abcdef"]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_key_is_not_sent_to_another_machine_in_plain_text(baton, monkeypatch, command) -> None:
    monkeypatch.setenv("BATON_API_KEY", "0123456789abcdef")
    monkeypatch.setattr(f"baton.cli.{command}.CONNECT_S", 0.2)
    # An address of nobody. With a key it is dialled with TLS, so there is nothing to refuse.
    ran = baton(command, "x", "--address", "192.0.2.1:50051")
    assert (ran.code, ran.out) == (3, "")
    assert "no router answers at 192.0.2.1:50051" in ran.err
    assert "0123456789abcdef" not in ran.err


@pytest.mark.parametrize(
    ("option", "kind", "expected"),
    [(["--regex", "a+"], "regex", "a+"), (["--choice", "a", "--choice", "b"], "choices", ["a", "b"])],
    ids=["regex", "choice"],
)
def test_a_grammar_arrives(baton, router, option, kind, expected) -> None:
    assert baton("generate", "x", "--address", router.address, *option).code == 0
    grammar = router.requests[0].grammar
    assert grammar.WhichOneof("kind") == kind
    assert (list(grammar.choices.texts) if kind == "choices" else grammar.regex) == expected


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
        (["x", "--seed", str(2**64)], None, "seed"),
        (["1 -2", "--token-ids"], None, "token_ids"),
        (["x", "--logit-bias", "4"], None, "ID=VALUE"),
        (["x", "--regex", "a", "--choice", "b"], None, "exclude each other"),
        (["x", "--logprobs"], None, "'--logprobs': add --json"),
        (["x", "--top-logprobs", "2"], None, "'--top-logprobs': add --json"),
        (["x", "--prompt-logprobs", "0"], None, "'--prompt-logprobs': add --json"),
        (["x", "--priority", "urgent"], None, "'--priority'"),
        (["x", "--timeout", "0"], None, "timeout_s is 0.0; it must be a number of seconds above 0"),
        (["x", "--lark", "/nowhere/grammar"], None, "'--lark': /nowhere/grammar cannot be read"),
    ],
    ids=[
        "bytes",
        "stdin-bytes",
        "empty",
        "empty-stdin",
        "words-as-ids",
        "seed",
        "negative-id",
        "bias",
        "two-grammars",
        "logprobs",
        "top-logprobs",
        "prompt-logprobs",
        "priority",
        "timeout",
        "no-file",
    ],
)
def test_wrong_input_is_exit_code_2_and_names_the_argument(baton, router, arguments, stdin, message) -> None:
    ran = baton("generate", *arguments, "--address", router.address, stdin=stdin)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert router.requests == []


def test_an_address_that_serves_something_else_is_named_as_such(baton) -> None:
    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    ran = baton("generate", "x", "--address", f"127.0.0.1:{port}")
    server.stop(0).wait()
    assert (ran.code, ran.out) == (3, "")
    assert "is it a router's public port" in ran.err


def test_nobody_there_is_exit_code_3(baton, monkeypatch) -> None:
    monkeypatch.setattr("baton.cli.generate.CONNECT_S", 0.2)
    ran = baton("generate", "x", "--address", "127.0.0.1:1")
    assert (ran.code, ran.out) == (3, "")
    assert "no router answers at 127.0.0.1:1" in ran.err
    assert "baton up" in ran.err


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_key_may_come_from_a_file_which_goes_before_the_environment(
    baton, router, monkeypatch, tmp_path, command
) -> None:
    monkeypatch.setenv("BATON_API_KEY", "from-the-environment")
    file = tmp_path / "key"
    file.write_text("0123456789abcdef-file\n")
    ran = baton(command, "x", "--address", router.address, "--api-key-file", str(file))
    assert ran.code == 0
    assert router.authorizations[-1] == "Bearer 0123456789abcdef-file"


@pytest.mark.parametrize(("content", "message"), [(None, "cannot be read"), ("\n", "is empty")])
def test_a_file_without_a_key_is_a_usage_error(baton, router, tmp_path, content, message) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_text(content)
    ran = baton("chat", "x", "--address", router.address, "--api-key-file", str(file))
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
