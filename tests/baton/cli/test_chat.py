from __future__ import annotations

import json

import pytest

from baton.cli.chat_loop import ChatLoop
from baton.cli.conversation import Conversation
from baton.sync_client import Client

NOT_UTF_8 = b"\xff".decode("utf-8", "surrogateescape")


def said(request) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in request.chat.messages]


def test_one_message_is_greedy_and_streams_the_answer(baton, router) -> None:
    ran = baton("chat", "What is the capital of France?", "--address", router.address)
    assert (ran.code, ran.out, ran.err) == (0, "Paris is it.\n", "")
    (request,) = router.requests
    assert said(request) == [("user", "What is the capital of France?")]
    assert request.HasField("temperature")
    assert request.temperature == 0.0
    assert request.max_tokens == 256


def test_a_system_message_comes_first(baton, router) -> None:
    baton("chat", "Hi", "--system", "Be brief.", "--address", router.address)
    assert said(router.requests[0]) == [("system", "Be brief."), ("user", "Hi")]


def test_a_dash_reads_standard_input(baton, router) -> None:
    baton("chat", "-", "--address", router.address, stdin=b"Hello")
    assert said(router.requests[0]) == [("user", "Hello")]


def test_json_is_one_object_with_the_answer_and_how_it_went(baton, router) -> None:
    ran = baton("chat", "Hi", "--system", "Be brief.", "--json", "--address", router.address)
    found = json.loads(ran.out)
    assert (ran.code, found["answers"][0]["text"]) == (0, "Paris is it.")
    assert found["summary"]["timings"]["ttft_ms"] == 12.5
    assert said(router.requests[0]) == [("system", "Be brief."), ("user", "Hi")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "'MESSAGE': give a message"),
        ([""], "'MESSAGE': it is empty"),
        ([NOT_UTF_8], "'MESSAGE': it is not valid UTF-8"),
        (["x", "--system", NOT_UTF_8], "'--system': it is not valid UTF-8"),
    ],
    ids=["none-without-terminal", "empty", "bytes", "system-bytes"],
)
def test_wrong_usage_is_exit_code_2(baton, router, arguments, message) -> None:
    ran = baton("chat", *arguments, "--address", router.address)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err


@pytest.fixture
def converse(monkeypatch, router):
    """Holds a conversation whose user types these lines; an exception stands for Ctrl-C or Ctrl-D."""

    def run(*lines: str | type[BaseException], system: str | None = None) -> list[list[tuple[str, str]]]:
        typed = iter(lines)

        def ask(_prompt: str) -> str:
            line = next(typed)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", ask)
        with Client.connect(router.address) as client:
            ChatLoop(Conversation(client, {"temperature": 0.0}, system=system)).run()
        assert list(typed) == []
        return [said(request) for request in router.requests]

    return run


ONE = [("user", "One")]
ANSWERED = [*ONE, ("assistant", "Paris is it.")]


@pytest.mark.parametrize("leave", ["/exit", "/quit", EOFError])
def test_a_conversation_keeps_its_history_until_the_user_leaves(converse, leave) -> None:
    assert converse("One", "", KeyboardInterrupt, "Two", leave) == [ONE, [*ANSWERED, ("user", "Two")]]


def test_ctrl_c_during_an_answer_forgets_this_exchange_and_retry_asks_again(
    converse, monkeypatch, capsys
) -> None:
    real = Conversation.say
    interrupts = iter([True, False, False])

    def say(self: Conversation, text: str, show) -> object:
        def interrupted(piece: str) -> None:
            show(piece)
            raise KeyboardInterrupt

        return real(self, text, interrupted if next(interrupts) else show)

    monkeypatch.setattr(Conversation, "say", say)
    assert converse("One", "/retry", "Two", "/exit") == [ONE, ONE, [*ANSWERED, ("user", "Two")]]
    assert "cancelled" in capsys.readouterr().err


def test_retry_takes_the_answer_back(converse) -> None:
    assert converse("One", "/retry", "/retry", EOFError) == [ONE, ONE, ONE]


def test_nothing_can_be_retried_before_it_is_asked(converse, capsys) -> None:
    assert converse("/retry", EOFError) == []
    assert "nothing has been asked yet" in capsys.readouterr().err


def test_clear_forgets_all_but_the_system_message(converse) -> None:
    assert converse("Zero", "/clear", "One", EOFError, system="Be brief.") == [
        [("system", "Be brief."), ("user", "Zero")],
        [("system", "Be brief."), *ONE],
    ]


def test_the_system_message_can_be_changed_and_looked_at(converse, capsys) -> None:
    assert converse("/system Be rude.", "One", "/system", EOFError) == [[("system", "Be rude."), *ONE]]
    assert capsys.readouterr().err.count("system message: Be rude.") == 2


def test_several_lines_are_one_message(converse) -> None:
    asked = converse('"""One', "Two", 'Three"""', "Four\\", "Five", '"""Six"""', EOFError)
    assert [messages[-1] for messages in asked] == [
        ("user", "One\nTwo\nThree"),
        ("user", "Four\nFive"),
        ("user", "Six"),
    ]


def test_ctrl_c_drops_a_message_of_several_lines(converse) -> None:
    assert converse('"""Zero', KeyboardInterrupt, "One", EOFError) == [ONE]


def test_two_slashes_send_a_message_that_begins_with_one(converse) -> None:
    assert converse("//etc is what?", EOFError) == [[("user", "/etc is what?")]]


def test_an_unknown_command_is_not_sent(converse, capsys) -> None:
    assert converse("/exti", EOFError) == []
    assert "there is no /exti; /help lists the commands" in capsys.readouterr().err


def test_help_names_every_command(converse, capsys) -> None:
    converse("/help", EOFError)
    words = capsys.readouterr().err.split()
    assert {"/system", "/clear", "/retry", "/save", "/stats", "/exit"} <= set(words)


def test_save_writes_the_messages_and_overwrites_nothing(converse, capsys, tmp_path) -> None:
    path = tmp_path / "kept.json"
    converse("One", f"/save {path}", f"/save {path}", EOFError)
    assert json.loads(path.read_text()) == {
        "messages": [
            {"role": "user", "content": "One"},
            {"role": "assistant", "content": "Paris is it."},
        ]
    }
    assert f"{path} is there already" in capsys.readouterr().err


def test_stats_add_the_answers_up(converse, capsys) -> None:
    converse("/stats", "One", "Two", "/stats", EOFError)
    err = capsys.readouterr().err
    assert "no answer yet" in err
    # The router of this test says 7 prompt tokens and 3 generated, each time.
    assert "2 answers: 14 prompt tokens (0 cached), 6 generated" in err
    assert "TTFT 12.5 ms" in err


def test_a_refused_message_does_not_end_the_conversation(converse, capsys) -> None:
    asked = converse(NOT_UTF_8, "One", "/exit")
    assert asked == [ONE]
    assert "not valid UTF-8" in capsys.readouterr().err


def test_an_answer_that_breaks_off_is_said_and_not_remembered(converse, router, capsys) -> None:
    router.breaks_off = True
    assert converse("One", "/exit") == [ONE]
    captured = capsys.readouterr()
    assert captured.out == "Paris is it.\n"
    assert "error: the worker is lost" in captured.err
