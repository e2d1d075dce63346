"""Reads a body into its model, or says what is wrong with it as OpenAI does: where, in a path.

Owns the translation of pydantic's errors. It knows no field.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, Final, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json

from baton.errors import InvalidRequest
from router.http.schema import REFUSED, Body

BodyT = TypeVar("BodyT", bound=Body)
Path = tuple[str | int, ...]

# What a value must be, by pydantic's names of what it is not.
_ALLOWED: Final = {
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "finite_number": "a finite number",
}
_MOST_CHARS: Final = 200


def read(model: type[BodyT], body: bytes) -> BodyT:
    """The body as a model; raises InvalidRequest, whose field is the path to what is wrong."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        # The context may hold what somebody wrote.
        errors = error.errors(include_url=False, include_context=True, include_input=False)
    if errors[0]["type"] == "json_invalid":
        raise InvalidRequest(f"the body cannot be read: {errors[0]['msg']}")
    raise _refusal(model, from_json(body), errors)


def _refusal(model: type[Body], data: Any, errors: Sequence[ErrorDetails]) -> InvalidRequest:
    """Of the errors that lie deepest the furthest, as the branch of a union that fits best; with all that is
    allowed there."""
    located = [(_path(data, error), error) for error in errors]
    path, first = max(located, key=lambda pair: _depth(pair[0]))
    param = _text(path)
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"unknown field {param!r}{_guess(model, path)}", field=param)
    if first["type"] == "missing":
        return InvalidRequest(f"{param} is missing", field=param)
    allowed = [_ALLOWED[error["type"]] for at, error in located if at == path and error["type"] in _ALLOWED]
    if allowed and first["type"] in _ALLOWED:
        return InvalidRequest(
            f"{param or 'the body'} must be {' or '.join(dict.fromkeys(allowed))}", field=param
        )
    if first["type"] == "not_served" or _is_refused(model, path):
        return InvalidRequest(f"{param} is not supported here; leave it out", field=param)
    return InvalidRequest(f"{param}: {first['msg']}", field=param)


def _path(data: Any, error: ErrorDetails) -> Path:
    """The place in the data: pydantic's own names for the branches of a union are left out."""
    path: list[str | int] = []
    for step in error["loc"]:
        is_there = isinstance(data, dict) and (step in data or error["type"] == "missing")
        if is_there and isinstance(step, str):
            path.append(step)
            data = data.get(step)
        elif isinstance(data, list) and isinstance(step, int) and step < len(data):
            path.append(step)
            data = data[step]
    return tuple(path)


def _depth(path: Path) -> tuple[int, list[int]]:
    return len(path), [step for step in path if isinstance(step, int)]


def _text(path: Path) -> str:
    """messages[0].content"""
    parts = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in path]
    return "".join(parts).removeprefix(".")[:_MOST_CHARS]


def _is_refused(model: type[Body], path: Path) -> bool:
    field = model.model_fields.get(str(path[0])) if path else None
    return field is not None and field.description == REFUSED


def _guess(model: type[Body], path: Path) -> str:
    """What may have been meant, at the top level."""
    if len(path) != 1:
        return ""
    names = [field.alias or name for name, field in model.model_fields.items()]
    close = difflib.get_close_matches(str(path[0])[:64], names, 1)
    return f"; did you mean {close[0]!r}?" if close else ""
