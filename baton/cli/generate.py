"""`baton generate`: continues a text."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from baton.cli.answer_printer import describe, print_answer, print_json
from baton.cli.options import (
    CONNECT_S,
    DEFAULT_ADDRESS,
    Address,
    AsJson,
    MaxTokens,
    MinP,
    Seed,
    Timeout,
    TopK,
    TopP,
    Verbose,
)
from baton.cli.text_input import open_stdout, read_text
from baton.client import AsyncClient


def generate(
    *,
    prompt: Annotated[str, typer.Argument(help='The text to continue; "-" reads standard input.')],
    address: Address = DEFAULT_ADDRESS,
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="The prompt is token ids, separated by commas or spaces.")
    ] = False,
    max_tokens: MaxTokens = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest token.", show_default="1")
    ] = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the model's end.")] = False,
    timeout_s: Timeout = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Continue a text and stream the answer to standard output.

    baton generate "The capital of France is" --max-tokens 16 --temperature 0
    """
    text = read_text(prompt, name="PROMPT")
    given: dict[str, Any] = {
        "prompt": None if token_ids else text,
        "token_ids": _parse_token_ids(text) if token_ids else None,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "ignore_eos": ignore_eos,
        "timeout_s": timeout_s,
    }
    open_stdout()
    asyncio.run(_generate(address, given, as_json=as_json, verbose=verbose))


async def _generate(address: str, given: dict[str, Any], *, as_json: bool, verbose: bool) -> None:
    async with await AsyncClient.connect(address, timeout_s=CONNECT_S) as client:
        generation = client.generate(**given)
        if as_json:
            await print_json(generation)
        else:
            await print_answer(generation)
        if verbose:
            typer.echo(describe(generation.summary), err=True)


def _parse_token_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        raise typer.BadParameter(f"not token ids: {error}", param_hint="'PROMPT'") from None
