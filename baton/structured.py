"""Answers as values of a class: the grammar that makes a model write them, and the reading of what it wrote.

A class is anything with pydantic's two methods; pydantic itself is not needed here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol, Self, TypeVar

from baton.answer import Answer
from baton.errors import IncompleteAnswer, InvalidRequest
from baton.sampling import Grammar


class SchemaClass(Protocol):
    """What a pydantic model has."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        """Its JSON schema."""

    @classmethod
    def model_validate_json(cls, json_data: str, /) -> Self:
        """The value that JSON text stands for."""


SchemaT = TypeVar("SchemaT", bound=SchemaClass)

_BY_NAME = ("properties", "$defs", "definitions", "patternProperties")
_IN_LIST = ("anyOf", "oneOf", "prefixItems")
_ONE = ("items", "additionalProperties")


def grammar_of(cls: type[SchemaClass]) -> Grammar:
    """What an answer must match to be a value of the class.

    Objects take no properties beside those that the class names, unless it says that it takes some:
    a model would go on inventing them. Raises InvalidRequest if the class has not the two methods.
    """
    methods = ("model_json_schema", "model_validate_json")
    if not isinstance(cls, type) or not all(callable(getattr(cls, name, None)) for name in methods):
        raise InvalidRequest(
            f"parse() takes a class with {' and '.join(methods)}, such as a pydantic model", field="grammar"
        )
    schema = _closed(cls.model_json_schema())
    return Grammar(kind="json_schema", source=json.dumps(schema, ensure_ascii=False))


def read(cls: type[SchemaT], answer: Answer) -> SchemaT:
    """The value of an answer that was to match grammar_of(cls).

    Raises IncompleteAnswer if it ended before its JSON did. What the class itself refuses, which a grammar
    cannot say, it raises (pydantic.ValidationError).
    """
    try:
        # A number that was cut off is a number too.
        is_whole = not isinstance(json.loads(answer.text), int | float) or answer.finish_reason != "length"
    except ValueError:
        is_whole = False
    if is_whole:
        return cls.model_validate_json(answer.text)
    if answer.finish_reason == "length":
        raise IncompleteAnswer(
            f"the answer ended after {len(answer.token_ids)} tokens, before its JSON was complete; "
            "raise max_tokens, or shorten the prompt where the context is full",
            field="max_tokens",
            text=answer.text,
        )
    raise IncompleteAnswer(
        "the answer ended before its JSON was complete; it met one of stop, stop_token_ids",
        field="stop" if answer.matched_stop else "stop_token_ids",
        text=answer.text,
    )


def _closed(schema: Any) -> Any:
    """The schema, with objects that name their properties and say nothing of others closed to those."""
    if not isinstance(schema, Mapping):
        return schema
    closed = dict(schema)
    for key in _BY_NAME:
        if isinstance(closed.get(key), Mapping):
            closed[key] = {name: _closed(part) for name, part in closed[key].items()}
    for key in _IN_LIST:
        if isinstance(closed.get(key), list):
            closed[key] = [_closed(part) for part in closed[key]]
    for key in _ONE:
        if key in closed:
            closed[key] = _closed(closed[key])
    # Parts of allOf see each other's properties as further ones.
    if "properties" in closed and "allOf" not in closed:
        closed.setdefault("additionalProperties", False)
    return closed
