"""The chart's values, told to people and to Helm: its README's table and values.schema.json.

Owns the form of that file: a comment `# -- text` before every value, and beneath it, where the default does
not say enough, a line `# @schema ...`:

    enum: [a, b]      what may be written              minimum: 1, maximum: 9, minLength: 1, pattern: ...
    free              anything, as Kubernetes or the user's names have it
    map: kind         names of the user's; each value is like the one that is there

Everything else is closed: a key that is not there is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent.parent / "deploy" / "helm" / "baton"
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object"}


@dataclass(kw_only=True)
class Value:
    """One key. line: where it is, from 1; children: of a map that is not free."""

    path: tuple[str, ...]
    line: int
    default: Any
    text: str = ""
    rules: dict[str, Any] = field(default_factory=dict)
    is_free: bool = False
    is_map: bool = False
    children: list[Value] = field(default_factory=list)


class ValuesError(ValueError):
    """values.yaml breaks its form; the message names the line."""


def written(chart: Path = CHART) -> dict[Path, str]:
    """Files that follow from values.yaml, and what has to be in them."""
    values = read_values((chart / "values.yaml").read_text())
    readme = chart / "README.md"
    return {
        chart / "values.schema.json": json.dumps(schema(values), indent=2) + "\n",
        readme: with_table(readme.read_text(), values),
    }


def read_values(text: str) -> list[Value]:
    """Raises ValuesError if a value has no text, or a rule cannot be read."""
    lines = text.splitlines()
    root = yaml.compose(text)
    if not isinstance(root, yaml.MappingNode):
        raise ValuesError("values.yaml is no map")
    return list(_read(root, lines, (), yaml.safe_load(text)))


def _read(node: yaml.MappingNode, lines: list[str], path: tuple[str, ...], default: Any) -> Iterator[Value]:
    for key, child in node.value:
        name, line = str(key.value), int(key.start_mark.line)
        value = Value(path=(*path, name), line=line + 1, default=default[name])
        _comment(value, lines)
        is_block = isinstance(child, yaml.MappingNode) and not child.flow_style and not value.is_free
        if is_block:
            value.children = list(_read(child, lines, value.path, default[name]))
        elif not value.text:
            raise ValuesError(f"line {line + 1}: {'.'.join(value.path)} has no comment '# -- what it is'")
        yield value


def _comment(value: Value, lines: list[str]) -> None:
    """Takes the lines above."""
    index = value.line - 2
    while index >= 0 and (stripped := lines[index].strip()).startswith("#"):
        if stripped.startswith("# @schema "):
            _rule(value, stripped.removeprefix("# @schema "))
        elif stripped.startswith("# -- "):
            value.text = stripped.removeprefix("# -- ")
            return
        index -= 1


def _rule(value: Value, rule: str) -> None:
    if rule == "free":
        value.is_free = True
    elif rule.startswith("map:"):
        value.is_map = True
    elif rule.startswith("pattern:"):
        value.rules["pattern"] = rule.removeprefix("pattern:").strip()
    else:
        try:
            read = yaml.safe_load("{" + rule + "}")
        except yaml.YAMLError as error:
            raise ValuesError(f"line {value.line}: @schema {rule!r} cannot be read: {error}") from None
        value.rules |= read


def schema(values: list[Value]) -> dict[str, Any]:
    """JSON Schema, draft 7, which every Helm knows. Closed at every level that is not free."""
    return {"$schema": "http://json-schema.org/draft-07/schema#", **_object(values)}


def _object(values: list[Value]) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {value.path[-1]: _schema(value) for value in values},
    }


def _schema(value: Value) -> dict[str, Any]:
    described = {"description": value.text} if value.text else {}
    if value.is_map:
        (only,) = value.children
        # Null takes a default away, as Helm has it.
        member = {**_object(only.children), "type": ["object", "null"]}
        return described | {"type": "object", "minProperties": 1, "additionalProperties": member}
    if value.children:
        found = _object(value.children)
        # Helm hands a parent chart's globals to all of its charts.
        return described | ({**found, "additionalProperties": True} if value.path == ("global",) else found)
    kind = _TYPES[type(value.default)]
    if kind == "integer" and "exclusiveMinimum" in value.rules:
        kind = "number"
    return described | {"type": kind} | value.rules


def with_table(readme: str, values: list[Value]) -> str:
    """The README with its table of values renewed, between two markers."""
    begin, end = "<!-- values -->\n", "<!-- end of values -->"
    head, _, rest = readme.partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        raise ValuesError(f"README.md lacks the lines {begin.strip()} and {end}")
    rows = [
        f"| `{name}` | {_shown(value.default)} | {_escaped(value.text)} |" for name, value in leaves(values)
    ]
    table = "\n".join(["| value | default | is |", "|---|---|---|", *rows])
    return f"{head}{begin}{table}\n{end}{tail}"


def leaves(values: list[Value], *, named: Mapping[str, str] | None = None) -> Iterator[tuple[str, Value]]:
    """Every value that has no children, with its path; names of the user's are <name>."""
    named = named or {}
    for value in values:
        parts = [named.get(".".join(value.path[: index + 1]), part) for index, part in enumerate(value.path)]
        if not value.children:
            yield ".".join(parts), value
            continue
        inner = dict(named)
        if value.is_map:
            inner[".".join(value.children[0].path)] = "<name>"
        yield from leaves(value.children, named=inner)


def _shown(default: Any) -> str:
    return f"`{_escaped(json.dumps(default))}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
