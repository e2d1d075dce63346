"""`baton chat`: one answer, or a conversation at the terminal."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from baton.cli.answer_printer import as_json as answers_as_json
from baton.cli.answer_printer import describe, end_broken_line
from baton.cli.chat_input import ChatInput, line_editing
from baton.cli.chat_loop import ChatLoop, printer
from baton.cli.conversation import Conversation
from baton.cli.options import (
    CONNECT_S,
    Address,
    ApiKeyFile,
    AsJson,
    InsecureKey,
    Seed,
    TlsCa,
    TopP,
    Verbose,
    api_key,
)
from baton.cli.styles import may_style
from baton.cli.text_input import open_stdout, read_text
from baton.cluster.defaults import DEFAULT_ADDRESS
from baton.errors import BatonError
from baton.sync_client import Client

# Marks, for readline, what takes no room on the screen.
_BOLD_PROMPT = "\001\x1b[1m\002> \001\x1b[0m\002"


def chat(
    *,
    message: Annotated[
        str | None,
        typer.Argument(help='What to say; "-" reads standard input. Without it, a conversation starts.'),
    ] = None,
    address: Address = DEFAULT_ADDRESS,
    tls_ca: TlsCa = None,
    api_key_file: ApiKeyFile = None,
    insecure_key: InsecureKey = False,
    system: Annotated[str | None, typer.Option(help="System message.", show_default="the model's")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of one answer.")] = 256,
    temperature: Annotated[
        float, typer.Option(help="0 always takes the likeliest token, so that an answer can be repeated.")
    ] = 0.0,
    top_p: TopP = None,
    seed: Seed = None,
    no_history: Annotated[
        bool, typer.Option("--no-history", help="Do not keep what is typed for the next conversation.")
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Talk to the model: one message, or a conversation when none is given.

    In a conversation, /help lists what else can be done, /exit or Ctrl-D leaves and Ctrl-C cancels the answer
    that is being given.
    """
    texts = {"MESSAGE": message, "--system": system}
    read = {name: read_text(text, name=name) for name, text in texts.items() if text is not None}
    if message is None and not sys.stdin.isatty():
        raise typer.BadParameter(
            'give a message, or "-" to read it from standard input', param_hint="'MESSAGE'"
        )
    if message is None and as_json:
        raise typer.BadParameter("takes one message, not a conversation", param_hint="'--json'")
    open_stdout()
    options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    with Client.connect(
        address,
        timeout_s=CONNECT_S,
        tls_ca=tls_ca,
        api_key=api_key(api_key_file),
        insecure_key=insecure_key,
    ) as client:
        if as_json:
            _print_json(client, options, read)
            return
        conversation = Conversation(client, options, system=read.get("--system"))
        if message is not None:
            _say(conversation, read["MESSAGE"], verbose=verbose)
        else:
            _talk(conversation, verbose=verbose, keep_history=not no_history)


def _say(conversation: Conversation, text: str, *, verbose: bool) -> None:
    """One answer, as it comes."""
    parts: list[str] = []
    show = printer()

    def pass_on(piece: str) -> None:
        show(piece)
        parts.append(piece)

    try:
        summary = conversation.say(text, pass_on)
    except (BatonError, KeyboardInterrupt):
        end_broken_line(parts)
        raise
    sys.stdout.write("\n")
    if verbose:
        typer.echo(describe(summary), err=True)


def _print_json(client: Client, options: dict[str, Any], read: dict[str, str]) -> None:
    """One answer, once it is complete, in the form of `baton generate --json`."""
    messages = [{"role": "user", "content": read["MESSAGE"]}]
    if "--system" in read:
        messages.insert(0, {"role": "system", "content": read["--system"]})
    generation = client.generate(messages=messages, **options)
    answers = generation.answers()
    typer.echo(answers_as_json(answers, generation.prompt_logprobs, generation.summary))


def _talk(conversation: Conversation, *, verbose: bool, keep_history: bool) -> None:
    with line_editing(keep_history=keep_history) as can_edit:
        styled = can_edit and may_style(sys.stdout)
        source = ChatInput(_BOLD_PROMPT) if styled else ChatInput()
        ChatLoop(conversation, verbose=verbose, source=source).run()
