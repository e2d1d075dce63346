"""`baton chat`: one answer, or a conversation at the terminal."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Annotated, Any

import typer

from baton.cli.answer_printer import describe, end_broken_line
from baton.cli.options import (
    CONNECT_S,
    DEFAULT_ADDRESS,
    Address,
    InsecureKey,
    Seed,
    TlsCa,
    TopP,
    Verbose,
    api_key,
)
from baton.cli.text_input import open_stdout, read_text
from baton.errors import BatonError
from baton.sync_client import Client

_EXIT_WORDS = frozenset({"/exit", "/quit"})


def chat(
    *,
    message: Annotated[
        str | None,
        typer.Argument(help='What to say; "-" reads standard input. Without it, a conversation starts.'),
    ] = None,
    address: Address = DEFAULT_ADDRESS,
    tls_ca: TlsCa = None,
    insecure_key: InsecureKey = False,
    system: Annotated[str | None, typer.Option(help="System message.", show_default="the model's")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of one answer.")] = 256,
    temperature: Annotated[
        float, typer.Option(help="0 always takes the likeliest token, so that an answer can be repeated.")
    ] = 0.0,
    top_p: TopP = None,
    seed: Seed = None,
    verbose: Verbose = False,
) -> None:
    """Talk to the model: one message, or a conversation when none is given.

    In a conversation, /exit or Ctrl-D leaves and Ctrl-C cancels the answer that is being given.
    """
    texts = {"MESSAGE": message, "--system": system}
    read = {name: read_text(text, name=name) for name, text in texts.items() if text is not None}
    if message is None and not sys.stdin.isatty():
        raise typer.BadParameter(
            'give a message, or "-" to read it from standard input', param_hint="'MESSAGE'"
        )
    open_stdout()
    options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    with Client.connect(
        address, timeout_s=CONNECT_S, tls_ca=tls_ca, api_key=api_key(), insecure_key=insecure_key
    ) as client:
        conversation = Conversation(client, options, system=read.get("--system"), verbose=verbose)
        if message is not None:
            conversation.say(read["MESSAGE"])
        else:
            conversation.loop()


class Conversation:
    """Messages so far, and the client that continues them."""

    def __init__(
        self, client: Client, options: dict[str, Any], *, system: str | None = None, verbose: bool = False
    ) -> None:
        self.messages = [{"role": "system", "content": system}] if system is not None else []
        self._client = client
        self._options = options
        self._verbose = verbose

    def say(self, text: str) -> None:
        """Sends a message and prints the answer as it comes; both join the history only if it ends well."""
        asked = [*self.messages, {"role": "user", "content": text}]
        generation = self._client.generate(messages=asked, **self._options)
        parts = []
        try:
            for chunk in generation:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
                parts.append(chunk.text)
        except BatonError:
            end_broken_line(parts)
            raise
        sys.stdout.write("\n")
        if self._verbose:
            typer.echo(describe(generation.summary), err=True)
        self.messages = [*asked, {"role": "assistant", "content": "".join(parts)}]

    def loop(self) -> None:
        """Reads and answers until the user leaves."""
        # Line editing and history for input(), where the platform has it.
        with suppress(ImportError):
            import readline  # noqa: F401, PLC0415
        typer.echo("/exit or Ctrl-D leaves, Ctrl-C cancels an answer", err=True)
        while (text := _ask()) is not None:
            if text:
                self._answer(text)

    def _answer(self, text: str) -> None:
        try:
            self.say(read_text(text, name="MESSAGE"))
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            typer.echo("cancelled; this exchange is forgotten", err=True)
        except (BatonError, typer.BadParameter) as error:
            typer.echo(f"error: {error}", err=True)


def _ask() -> str | None:
    """The next message, "" to ask again, or None when the user leaves."""
    try:
        text = input("> ").strip()
    except EOFError:
        sys.stdout.write("\n")
        return None
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return ""
    return None if text in _EXIT_WORDS else text
