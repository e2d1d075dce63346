"""Definitions of functions that a model may call, checked; and JSON objects that clients send as text.

Knows neither templates nor how models write calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from baton.errors import InvalidRequest
from baton.schema_places import place_too_deep

MAX_TOOLS = 128
# Templates indent, so that depth multiplies what is rendered.
MAX_DEPTH = 64
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def read_tools(texts: Sequence[str]) -> list[dict[str, Any]]:
    """The definitions, as a template takes them; raises InvalidRequest, naming "tools" and the place.

    Each is an object {"type": "function", "function": {"name", "description", "parameters"}}; the last
    two may be absent or null, and whatever else is there is left as it is.
    """
    if len(texts) > MAX_TOOLS:
        raise InvalidRequest(f"there are {len(texts)} tools; send at most {MAX_TOOLS}", field="tools")
    tools = [read_object(text, f"tools[{index}]", field="tools") for index, text in enumerate(texts)]
    names: set[str] = set()
    for index, tool in enumerate(tools):
        name = _checked_name(tool, f"tools[{index}]")
        if name in names:
            _refuse(f"tools[{index}].function.name", f"{name!r} names another function too")
        names.add(name)
    return tools


def read_object(text: str, place: str, *, field: str) -> dict[str, Any]:
    """The JSON object in a text; raises InvalidRequest, naming the field and the place."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
        # Half of a pair of surrogates is no text that a tokenizer takes.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{place} is not valid JSON: {_reason(error)}", field=field) from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{place} must be a JSON object", field=field)
    if place_too_deep(value, MAX_DEPTH):
        raise InvalidRequest(f"{place} is nested more than {MAX_DEPTH} deep", field=field)
    return value


def _checked_name(tool: dict[str, Any], place: str) -> str:
    """The name of a tool's function, once all of the tool is sound."""
    if tool.get("type") != "function":
        _refuse(f"{place}.type", 'it must be "function"')
    function = tool.get("function")
    if not isinstance(function, dict):
        _refuse(f"{place}.function", "it must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        _refuse(f"{place}.function.name", "it must be 1 to 64 of the characters a-z, A-Z, 0-9, _ and -")
    if not isinstance(function.get("description", ""), str | None):
        _refuse(f"{place}.function.description", "it must be text")
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None) or (parameters or {}).get("type", "object") != "object":
        _refuse(f"{place}.function.parameters", "it must be the JSON schema of an object")
    return name


def _refuse(place: str, reason: str) -> NoReturn:
    raise InvalidRequest(f"{place}: {reason}", field="tools")


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno}, column {error.colno}: {error.msg}"
    if isinstance(error, UnicodeEncodeError):
        return "it has half of a pair of surrogates"
    return "it is nested too deep" if isinstance(error, RecursionError) else str(error)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
