"""A conversation at the terminal: messages, and commands that begin with a slash."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import typer

from baton.answer import Summary
from baton.cli.answer_printer import describe
from baton.cli.chat_input import ChatInput
from baton.cli.conversation import Conversation
from baton.cli.styles import may_style
from baton.cli.text_input import read_text
from baton.cli.word_wrap import WordWrap
from baton.errors import BatonError

_HELP = """\
/system [TEXT]  show or set the system message
/clear          forget all but the system message
/retry          ask the last question again, in place of its answer
/save [FILE]    write the messages as JSON
/stats          how the answers went
/exit           leave; so do /quit and Ctrl-D
A message of several lines stands between \"\"\" and \"\"\", or its lines end in \\.
Ctrl-C cancels an answer. A message that begins with a slash is written with two."""


class ChatLoop:
    """Reads, answers and obeys until the user leaves. Only answers go to standard output.

    verbose: says after each answer how it went.
    """

    def __init__(
        self, conversation: Conversation, *, verbose: bool = False, source: ChatInput | None = None
    ) -> None:
        self._conversation = conversation
        self._verbose = verbose
        self._input = source or ChatInput()
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: _note(_HELP),
            "/system": self._set_system,
            "/clear": self._clear,
            "/retry": self._retry,
            "/save": self._save,
            "/stats": self._show_stats,
        }

    def run(self) -> None:
        """Returns when the user leaves."""
        _note("/help lists commands, /exit or Ctrl-D leaves, Ctrl-C cancels an answer")
        while (text := self._input.read()) is not None:
            if text in ("/exit", "/quit"):
                return
            if text.startswith("/") and not text.startswith("//"):
                self._obey(text)
            elif text:
                self.answer(text.removeprefix("/") if text.startswith("//") else text)

    def answer(self, text: str) -> None:
        """Asks, and shows the answer or what became of it."""
        parts: list[str] = []
        show = printer()

        def pass_on(piece: str) -> None:
            show(piece)
            parts.append(piece)

        try:
            summary = self._conversation.say(read_text(text, name="MESSAGE"), pass_on)
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            _note("cancelled; this exchange is forgotten, /retry asks again")
        except (BatonError, typer.BadParameter) as error:
            sys.stdout.write("\n" if parts else "")
            sys.stdout.flush()
            _note(f"error: {error}")
        else:
            sys.stdout.write("\n")
            if self._verbose:
                _note(describe(summary))

    def _obey(self, text: str) -> None:
        name, _, argument = text.partition(" ")
        command = self._commands.get(name)
        if command is None:
            _note(f"there is no {name}; /help lists the commands, //... sends a message that begins with /")
        else:
            command(argument.strip())

    def _set_system(self, text: str) -> None:
        if text:
            self._conversation.system = text
        _note(f"system message: {self._conversation.system or 'none of yours'}")

    def _clear(self, _argument: str) -> None:
        self._conversation.clear()
        _note("forgotten")

    def _retry(self, _argument: str) -> None:
        text = self._conversation.take_back()
        if text is None:
            _note("nothing has been asked yet")
        else:
            self.answer(text)

    def _save(self, name: str) -> None:
        path = Path(name or f"chat-{datetime.now().astimezone():%Y-%m-%d-%H%M%S}.json").expanduser()
        text = json.dumps({"messages": self._conversation.messages}, ensure_ascii=False, indent=1) + "\n"
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            _note(f"{path} is there already; name another file")
        except OSError as error:
            _note(f"not saved: {error}")
        else:
            _note(f"saved {len(self._conversation.messages)} messages to {path}")

    def _show_stats(self, _argument: str) -> None:
        for line in stats(self._conversation.summaries):
            _note(line)


def stats(summaries: list[Summary]) -> list[str]:
    """What all answers took together, and how the last one went."""
    if not summaries:
        return ["no answer yet"]
    prompts = sum(summary.num_prompt_tokens for summary in summaries)
    cached = sum(summary.num_cached_tokens for summary in summaries)
    outputs = sum(summary.num_output_tokens for summary in summaries)
    answers = f"{len(summaries)} answer" + "s" * (len(summaries) != 1)
    total = f"{answers}: {prompts} prompt tokens ({cached} cached), {outputs} generated"
    return [total, *f"last: {describe(summaries[-1])}".splitlines()]


def printer() -> Callable[[str], object]:
    """Shows pieces of an answer as they come: with whole words on a terminal, exactly elsewhere."""
    if sys.stdout.isatty():
        return WordWrap(sys.stdout, shutil.get_terminal_size().columns).write

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    return write


def _note(text: str) -> None:
    typer.echo(typer.style(text, dim=True) if may_style(sys.stderr) else text, err=True)
