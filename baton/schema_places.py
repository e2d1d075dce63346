"""Finds the place in a JSON schema that a compiler refuses without saying where.

A subschema is at fault if it is refused alone, for the same reason, and none of its own
subschemas is. Knows the keywords that hold subschemas; what is refused is for the caller to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

# Refused schemas are refused early, so a trial costs milliseconds at most.
_MAX_TRIALS = 200
_ROOT = "#/$defs/root"
# A key and the link to the container that has it.
_Link = tuple[str, "_Link | None"]
_SINGLE = (
    "items",
    "additionalItems",
    "additionalProperties",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
# Definitions last: what is used is a better place to name.
_MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")


class SchemaPlaces:
    """The subschemas of one schema.

    refuses: why a schema is refused; "" if it is not.
    """

    def __init__(self, schema: Any, refuses: Callable[[Any], str]) -> None:
        self._schema = schema
        self._refuses = refuses
        # Pointers into the schema, as pointers into a document that has it as a definition.
        self._definition = _moved(schema)
        self._num_trials = 0

    def find(self, reason: str) -> str:
        """The JSON pointer, from "#", of the deepest subschema refused for that reason."""
        pointer, seen = "#", {"#"}
        while (child := self._failing_child(pointer, reason)) is not None and child not in seen:
            seen.add(child)
            pointer = child
        return pointer

    def _failing_child(self, pointer: str, reason: str) -> str | None:
        children = [
            child
            for child in _children(_resolve(self._schema, pointer), pointer)
            if isinstance(_resolve(self._schema, child), dict)
        ]
        while len(children) > 1:
            half = children[: len(children) // 2]
            children = half if self._fails(half, reason) else children[len(half) :]
        return children[0] if children and self._fails(children, reason) else None

    def _fails(self, pointers: list[str], reason: str) -> bool:
        self._num_trials += 1
        if self._num_trials > _MAX_TRIALS:
            return False
        refs = {str(index): {"$ref": _ROOT + pointer[1:]} for index, pointer in enumerate(pointers)}
        trial = {
            "$defs": {"root": self._definition},
            "type": "object",
            "properties": refs,
            "required": list(refs),
        }
        return _essence(self._refuses(trial)) == _essence(reason)


def place_too_deep(schema: Any, max_depth: int) -> str:
    """The JSON pointer of a container more than max_depth deep, or "" if there is none."""
    # With the way to each container: pointers to all of them could be far longer than the schema.
    level: list[tuple[Any, _Link | None]] = [(schema, None)]
    for _ in range(max_depth):
        level = [
            (value, (key, link))
            for container, link in level
            for key, value in _entries(container)
            if isinstance(value, dict | list)
        ]
    return _pointer(level[0][1]) if level else ""


def _pointer(link: _Link | None) -> str:
    parts = []
    while link is not None:
        key, link = link
        parts.append(_escape(key))
    return "/".join(["#", *reversed(parts)])


def _essence(reason: str) -> str:
    """A reason without what depends on where the refused schema stands."""
    return reason.partition("\n  while processing ")[0].replace(_ROOT[1:], "")


def _entries(container: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(container, dict):
        yield from container.items()
    elif isinstance(container, list):
        yield from ((str(index), value) for index, value in enumerate(container))


def _children(schema: Any, pointer: str) -> Iterator[str]:
    """Pointers of the schemas that a schema may be made of, what it refers to included."""
    if not isinstance(schema, dict):
        return
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#/"):
        yield reference
    yield from (f"{pointer}/{key}" for key in _SINGLE if isinstance(schema.get(key), dict))
    for key in (*_LISTS, *_MAPS):
        kind = list if key in _LISTS else dict
        if isinstance(held := schema.get(key), kind):
            yield from (f"{pointer}/{key}/{_escape(name)}" for name, _ in _entries(held))


def _resolve(schema: Any, pointer: str) -> Any:
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, dict) and name in schema:
            schema = schema[name]
        elif isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        else:
            return None
    return schema


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _moved(value: Any) -> Any:
    if isinstance(value, list):
        return [_moved(item) for item in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _moved(item) for key, item in value.items()}
    if isinstance(reference := moved.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = _ROOT + reference[1:]
    return moved
