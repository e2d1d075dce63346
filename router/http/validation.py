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
from router.http.schema import NO_TOKEN_ID, REFUSED, TOO_LONG, UNKNOWN_FIELD, Body

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
_FAULTS: Final = {"missing": "missing", NO_TOKEN_ID: "no token id"}
_MOST_CHARS: Final = 200
# Of one body; there are no more than a few for each field that there is.
_MOST_ERRORS: Final = 32
# Of brackets, braces and colons, those in texts too: 16 MiB of lists take 3 to 5 s to read, in which no other
# thread runs, and half a million a tenth of that. Text has as many in some 10 MiB.
MAX_MARKS: Final = 2**19
_MARKS: Final = (b"[", b"{", b":")


def read(model: type[BodyT], body: bytes) -> BodyT:
    """The body as a model; raises InvalidRequest, whose field is the path to what is wrong."""
    # Before anything is made of them.
    if sum(map(body.count, _MARKS)) > MAX_MARKS:
        raise InvalidRequest(f"the body has more than {MAX_MARKS} brackets, braces and colons")
    try:
        data = from_json(body, cache_strings="none")
    except ValueError as error:
        raise InvalidRequest(f"the body cannot be read: {error}") from None
    try:
        return model.model_validate(data)
    except ValidationError as error:
        # The context may hold what somebody wrote.
        errors = error.errors(include_url=False, include_context=True, include_input=False)
    raise _refusal(model, data, errors[:_MOST_ERRORS])


def _refusal(model: type[Body], data: Any, errors: Sequence[ErrorDetails]) -> InvalidRequest:
    """Of the errors that lie deepest the furthest, as the branch of a union that fits best; with all that is
    allowed there."""
    # Whatever else a list would be, what is too long has the right type.
    too_long = [error for error in errors if error["type"] == TOO_LONG]
    located = [(_path(data, error), error) for error in too_long or errors]
    path, first = max(located, key=lambda pair: _depth(pair[0]))
    param = _text(path)
    if first["type"] == TOO_LONG:
        most = first["ctx"]["max_length"]
        return InvalidRequest(f"{param} has more than {most} entries; send at most {most}", field=param)
    if first["type"] == UNKNOWN_FIELD:
        return InvalidRequest(f"unknown field {param!r}{_guess(model, path)}", field=param)
    if first["type"] in _FAULTS:
        return InvalidRequest(f"{param} is {_FAULTS[first['type']]}", field=param)
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
    if error["type"] in (UNKNOWN_FIELD, NO_TOKEN_ID):
        path.append(error["ctx"]["name"])
    return tuple(path)


def _depth(path: Path) -> tuple[int, list[int]]:
    return len(path), [step for step in path if isinstance(step, int)]


def _text(path: Path) -> str:
    """messages[0].content"""
    parts = [f"[{step}]" if isinstance(step, int) else f".{step[:_MOST_CHARS]}" for step in path]
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
