from __future__ import annotations

import pytest

from baton.cli.chat import Conversation
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


def converse(monkeypatch, router, lines: list[str | type[BaseException]]) -> None:
    """A conversation whose user types these lines; an exception stands for Ctrl-C or Ctrl-D."""
    typed = iter(lines)

    def ask(_prompt: str) -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", ask)
    with Client.connect(router.address) as client:
        Conversation(client, {"temperature": 0.0}).loop()
    assert list(typed) == []


@pytest.mark.parametrize("leave", ["/exit", EOFError])
def test_a_conversation_keeps_its_history_until_the_user_leaves(monkeypatch, router, leave) -> None:
    converse(monkeypatch, router, ["One", "", KeyboardInterrupt, "Two", leave])
    first = [("user", "One")]
    assert [said(request) for request in router.requests] == [
        first,
        [*first, ("assistant", "Paris is it."), ("user", "Two")],
    ]


def test_ctrl_c_during_an_answer_forgets_this_exchange(monkeypatch, router, capsys) -> None:
    real = Conversation.say
    interrupts = iter([True, False])

    def say(self: Conversation, text: str) -> None:
        if next(interrupts):
            raise KeyboardInterrupt
        real(self, text)

    monkeypatch.setattr(Conversation, "say", say)
    converse(monkeypatch, router, ["One", "Two", "/exit"])
    assert [said(request) for request in router.requests] == [[("user", "Two")]]
    assert "cancelled" in capsys.readouterr().err


def test_a_refused_message_does_not_end_the_conversation(monkeypatch, router, capsys) -> None:
    converse(monkeypatch, router, [NOT_UTF_8, "Two", "/exit"])
    assert [said(request) for request in router.requests] == [[("user", "Two")]]
    assert "not valid UTF-8" in capsys.readouterr().err
