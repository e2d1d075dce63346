"""The grammar of an answer that is nothing but calls.

Lark in llguidance's dialect, with the functions' own schemas inside (docs/adr/0004). It writes calls
as templates write earlier ones, so that the model meets what it was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from baton.errors import InvalidRequest
from baton.grammars import JSON_OPTIONS
from baton.sampling import Grammar
from router.tool_calls.syntax import CallSyntax

_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def call_grammar(
    syntax: CallSyntax,
    token_ids: Mapping[str, int],
    tools: Sequence[Mapping[str, Any]],
    *,
    function: str,
    parallel: bool,
) -> Grammar:
    """See ToolFormat.grammar. token_ids: markers that are tokens of their own, which no text can spell."""
    functions = [tool["function"] for tool in tools]
    if function:
        functions = [candidate for candidate in functions if candidate["name"] == function]
    if not functions:
        missing = f"function {function!r} is none of the tools" if function else "there are no tools to call"
        raise InvalidRequest(f"tool_choice: {missing}", field="tool_choice")
    rules = [_start(syntax, token_ids, has_more=parallel and not function)]
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(functions))))
    for index, one in enumerate(functions):
        head = f'{{"name": {json.dumps(one["name"])}, "{syntax.arguments_keys[0]}": '
        rules.append(f'call_{index}: {_quoted(head)} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: %json {json.dumps(_schema(one))}")
    return Grammar(kind="lark", source="\n".join(rules))


def _start(syntax: CallSyntax, token_ids: Mapping[str, int], *, has_more: bool) -> str:
    begin, end = (
        f"<[{token_ids[marker]}]>" if marker in token_ids else _quoted(marker)
        for marker in (syntax.begin, syntax.end)
    )
    if syntax.is_bare:
        # Models that write so call one function at a time.
        return "start: call"
    if syntax.opening == "[":
        more = ' (", " call)*' if has_more else ""
        return f'start: {begin} / ?/ "[" call{more} "]"'
    more = ' ("\\n" block)*' if has_more else ""
    return f'start: block{more}\nblock: {begin} "\\n" call "\\n" {end}'


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters") or _NO_ARGUMENTS
    if "x-guidance" in schema:
        raise InvalidRequest(
            f"the parameters of function {function['name']!r} have x-guidance: options of the compiler "
            "cannot be set by a request",
            field="tools",
        )
    return {"x-guidance": JSON_OPTIONS, "type": "object", **schema}


def _quoted(text: str) -> str:
    # A string of Lark is a string of JSON.
    return json.dumps(text)
