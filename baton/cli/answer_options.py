"""The options of `baton generate` that say what an answer may be, and how they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from baton.sampling import Grammar

_CONSTRAINTS = "Constraints"
_SERVICE = "Service"

Penalty = Annotated[float | None, typer.Option(help="Against tokens that the answer has, -2 to 2.")]
FrequencyPenalty = Annotated[float | None, typer.Option(help="The same, once per occurrence.")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Divides logits of tokens seen; 1 is none.")]
MinTokens = Annotated[int | None, typer.Option(help="Tokens before the answer may end.")]
N = Annotated[int | None, typer.Option("--n", "-n", help="How many answers.", show_default="1")]
Stop = Annotated[
    list[str] | None, typer.Option(help="Text that ends the answer; can be given several times.")
]
IncludeStop = Annotated[bool, typer.Option("--include-stop", help="Show the stop that was found.")]
StopTokenIds = Annotated[
    list[int] | None, typer.Option("--stop-token-id", help="Token that ends the answer; several times.")
]
KeepSpecial = Annotated[bool, typer.Option("--keep-special-tokens", help="Show special tokens in the text.")]
Truncate = Annotated[
    int | None, typer.Option("--truncate-prompt", help="Keep that many tokens of the prompt, its last.")
]
Logprobs = Annotated[bool, typer.Option("--logprobs", help="With --json: each token's log-probability.")]
TopLogprobs = Annotated[int | None, typer.Option(help="With --json: and the likeliest tokens beside it.")]
PromptLogprobs = Annotated[int | None, typer.Option(help="With --json: the same for the prompt's tokens.")]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(help="ID=VALUE, added to a token's logit; several times.", rich_help_panel=_CONSTRAINTS),
]
AllowedTokenIds = Annotated[
    list[int] | None,
    typer.Option(
        "--allowed-token-id", help="Token that may come; several times.", rich_help_panel=_CONSTRAINTS
    ),
]
JsonSchema = Annotated[
    Path | None,
    typer.Option(help="File with the answer's JSON schema.", dir_okay=False, rich_help_panel=_CONSTRAINTS),
]
Regex = Annotated[
    str | None, typer.Option(help="Regular expression of the answer.", rich_help_panel=_CONSTRAINTS)
]
Lark = Annotated[
    Path | None,
    typer.Option(
        help="File with the answer's grammar in Lark syntax.", dir_okay=False, rich_help_panel=_CONSTRAINTS
    ),
]
Choice = Annotated[
    list[str] | None,
    typer.Option(help="Text that the answer may be; several times.", rich_help_panel=_CONSTRAINTS),
]

Priority = Annotated[
    Literal["low", "normal", "high"] | None,
    typer.Option(
        help="Who goes first.",
        show_default="normal",
        rich_help_panel=_SERVICE,
    ),
]
TtftObjective = Annotated[
    float | None,
    typer.Option(
        "--ttft-objective-ms",
        help="Longest wait for the first token; where it cannot be met, the request is refused.",
        show_default="the router's",
        rich_help_panel=_SERVICE,
    ),
]


def read_grammar(
    *, json_schema: Path | None, regex: str | None, lark: Path | None, choice: list[str] | None
) -> Grammar | None:
    """What the answer must match; raises typer.BadParameter for a file that cannot be read, or for two."""
    kinds = {"json_schema": json_schema, "regex": regex, "lark": lark, "choice": choice}
    given = [kind for kind, value in kinds.items() if value]
    if len(given) > 1:
        flags = " and ".join(_flag(kind) for kind in given)
        raise typer.BadParameter(f"{flags} exclude each other")
    if choice:
        return Grammar(kind="choice", choices=tuple(choice))
    for kind, value in kinds.items():
        if isinstance(value, Path):
            return Grammar(kind=kind, source=_read(value, kind))
    return Grammar(kind="regex", source=regex) if regex else None


def read_bias(pairs: list[str] | None) -> dict[int, float]:
    """Values by token id; raises typer.BadParameter for what is not ID=VALUE."""
    try:
        return {int(token_id): float(value) for token_id, _, value in (p.partition("=") for p in pairs or ())}
    except ValueError:
        raise typer.BadParameter("write ID=VALUE, as in 42=-5", param_hint="'--logit-bias'") from None


def _read(path: Path, kind: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}", param_hint=f"'{_flag(kind)}'") from None


def _flag(kind: str) -> str:
    return "--" + kind.replace("_", "-")
