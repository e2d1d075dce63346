"""`baton generate`: continues a text."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from baton.cli import answer_options as answer
from baton.cli.answer_printer import describe, print_answers, print_json
from baton.cli.options import (
    CONNECT_S,
    Address,
    ApiKeyFile,
    AsJson,
    InsecureKey,
    MaxTokens,
    MinP,
    Seed,
    Timeout,
    TlsCa,
    TopK,
    TopP,
    Verbose,
    api_key,
)
from baton.cli.text_input import open_stdout, read_text
from baton.client import AsyncClient
from baton.cluster.defaults import DEFAULT_ADDRESS

_NOT_OF_THE_REQUEST = ("address", "tls_ca", "api_key_file", "insecure_key", "as_json", "verbose")
_ONLY_IN_JSON = {
    "logprobs": "--logprobs",
    "top_logprobs": "--top-logprobs",
    "prompt_logprobs": "--prompt-logprobs",
}
_GRAMMARS = ("json_schema", "regex", "lark", "choice")


def generate(
    *,
    prompt: Annotated[str, typer.Argument(help='The text to continue; "-" reads standard input.')],
    address: Address = DEFAULT_ADDRESS,
    tls_ca: TlsCa = None,
    api_key_file: ApiKeyFile = None,
    insecure_key: InsecureKey = False,
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="The prompt is token ids, separated by commas or spaces.")
    ] = False,
    truncate_prompt_tokens: answer.Truncate = None,
    n: answer.N = None,
    max_tokens: MaxTokens = None,
    min_tokens: answer.MinTokens = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest token.", show_default="1")
    ] = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: answer.RepetitionPenalty = None,
    presence_penalty: answer.Penalty = None,
    frequency_penalty: answer.FrequencyPenalty = None,
    seed: Seed = None,
    stop: answer.Stop = None,
    include_stop_in_text: answer.IncludeStop = False,
    stop_token_ids: answer.StopTokenIds = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the model's end.")] = False,
    keep_special_tokens: answer.KeepSpecial = False,
    json_schema: answer.JsonSchema = None,
    regex: answer.Regex = None,
    lark: answer.Lark = None,
    choice: answer.Choice = None,
    logit_bias: answer.LogitBias = None,
    allowed_token_ids: answer.AllowedTokenIds = None,
    logprobs: answer.Logprobs = False,
    top_logprobs: answer.TopLogprobs = None,
    prompt_logprobs: answer.PromptLogprobs = None,
    priority: answer.Priority = None,
    ttft_objective_ms: answer.TtftObjective = None,
    timeout_s: Timeout = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Continue a text and stream the answer to standard output.

    baton generate "The capital of France is" --max-tokens 16 --temperature 0
    """
    # Each option has the name of the request's field, but for a few that _request() translates.
    given = _request(dict(locals()))
    open_stdout()
    connection = {
        "target": address,
        "tls_ca": tls_ca,
        "api_key": api_key(api_key_file),
        "insecure_key": insecure_key,
    }
    asyncio.run(_generate(connection, given, as_json=as_json, verbose=verbose))


def _request(given: dict[str, Any]) -> dict[str, Any]:
    """What the SDK is to be asked, from the options as they were typed."""
    if not given["as_json"]:
        _refuse_unseen(given)
    for name in _NOT_OF_THE_REQUEST:
        del given[name]
    text = read_text(given["prompt"], name="PROMPT")
    is_ids = given["token_ids"]
    given |= {"prompt": None if is_ids else text, "token_ids": _parse_token_ids(text) if is_ids else None}
    given["skip_special_tokens"] = False if given.pop("keep_special_tokens") else None
    given["grammar"] = answer.read_grammar(**{kind: given.pop(kind) for kind in _GRAMMARS})
    given["logprobs"] = given["logprobs"] or bool(given["top_logprobs"])
    given["logit_bias"] = answer.read_bias(given["logit_bias"])
    return given


def _refuse_unseen(given: dict[str, Any]) -> None:
    """Raises typer.BadParameter for an option whose result the text does not show."""
    for name, flag in _ONLY_IN_JSON.items():
        # 0 is a request too: for the tokens themselves, without others beside them.
        if given[name] is not None and given[name] is not False:
            raise typer.BadParameter("add --json, which shows them", param_hint=f"'{flag}'")


async def _generate(
    connection: dict[str, Any], given: dict[str, Any], *, as_json: bool, verbose: bool
) -> None:
    async with await AsyncClient.connect(**connection, timeout_s=CONNECT_S) as client:
        generation = client.generate(**given)
        if as_json:
            await print_json(generation)
        else:
            await print_answers(generation, given["n"] or 1)
        if verbose:
            typer.echo(describe(generation.summary), err=True)


def _parse_token_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        message = "not token ids: write whole numbers, separated by commas or spaces"
        raise typer.BadParameter(message, param_hint="'PROMPT'") from None
