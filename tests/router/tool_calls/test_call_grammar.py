"""Forced calls: nothing but calls can be written, and what can be written is read back."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from baton.errors import InvalidRequest
from baton.grammars import CompiledGrammar, GrammarCompiler
from baton.sampling import Grammar
from router.tool_calls import CallDelta, ToolFormat, tool_format
from tests.grammar_answers import draw
from tests.router.tiny_text import EOS
from tests.router.tool_templates import CLOCK, TEMPLATES, WEATHER, tool_tokenizer

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"$ref": "#/$defs/place"}, "far": {"type": "boolean"}},
            "required": ["at", "far"],
            "additionalProperties": False,
            "$defs": {"place": {"enum": ["a", "b", "</tool_call>"]}},
        },
    },
}
TOOLS = [LOOK, CLOCK, {"type": "function", "function": {"name": "bare"}}]
TOKENIZER = tool_tokenizer()


@functools.cache
def compiler() -> GrammarCompiler:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        TOKENIZER.save(str(path))
        return GrammarCompiler(path, 300, (EOS,))


def format_of(model: str) -> ToolFormat:
    found = tool_format(TEMPLATES[model], TOKENIZER)
    assert found is not None
    return found


def compiled(model: str, tools: list[dict[str, Any]], **options: Any) -> CompiledGrammar:
    return compiler().compile(format_of(model).grammar(tools, **options))


def may_be(grammar: CompiledGrammar, text: str) -> bool:
    """Whether the text, as the tokenizer reads it, is a whole answer."""
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    matcher = grammar.matcher()
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


ARGUMENTS = '{"at": "a", "far": true}'
ONE = {
    "qwen": f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "mistral": f'[TOOL_CALLS] [{{"name": "look", "arguments": {ARGUMENTS}}}]',
    "llama": f'{{"name": "look", "parameters": {ARGUMENTS}}}',
}
TWO = {
    "qwen": f'{ONE["qwen"]}\n<tool_call>\n{{"name": "bare", "arguments": {{}}}}\n</tool_call>',
    "mistral": f'{ONE["mistral"][:-1]}, {{"name": "bare", "arguments": {{}}}}]',
}


@pytest.mark.parametrize("model", ONE)
def test_one_call_is_written_as_templates_write_it(model: str) -> None:
    grammar = compiled(model, TOOLS)
    assert may_be(grammar, ONE[model])
    assert may_be(compiled(model, TOOLS, function="look"), ONE[model])
    assert may_be(compiled(model, TOOLS, parallel=False), ONE[model])
    assert not may_be(compiled(model, TOOLS, function="clock"), ONE[model])
    for text in ("", "no", f"so: {ONE[model]}", ONE[model].replace("look", "hook")):
        assert not may_be(grammar, text)
    for wrong in ('{"at": "c", "far": true}', '{"at": "a"}', '{"at": "a", "far": true, "x": 1}'):
        assert not may_be(grammar, ONE[model].replace(ARGUMENTS, wrong))


@pytest.mark.parametrize("model", TWO)
def test_several_calls_only_where_they_are_wanted(model: str) -> None:
    assert may_be(compiled(model, TOOLS), TWO[model])
    assert not may_be(compiled(model, TOOLS, parallel=False), TWO[model])
    twice = TWO[model].replace('"bare"', '"look"').replace("{}", ARGUMENTS)
    assert may_be(compiled(model, TOOLS), twice)
    assert not may_be(compiled(model, TOOLS, function="look"), twice)


def test_arguments_are_an_object_whatever_the_schema_says() -> None:
    parameters = {"properties": {"a": {"type": "integer"}}}
    grammar = compiled("qwen", [{"type": "function", "function": {"name": "look", "parameters": parameters}}])
    assert may_be(grammar, ONE["qwen"].replace(ARGUMENTS, '{"a": 1}'))
    assert not may_be(grammar, ONE["qwen"].replace(ARGUMENTS, "[]"))


def test_a_model_that_calls_once_is_not_made_to_call_twice() -> None:
    assert not may_be(compiled("llama", TOOLS), f"{ONE['llama']}; {ONE['llama']}")


def test_markers_are_their_tokens_never_their_letters() -> None:
    grammar = compiled("qwen", TOOLS)
    letters = [TOKENIZER.encode(char, add_special_tokens=False).ids[0] for char in "<tool_call>"]
    matcher = grammar.matcher()
    assert matcher.try_consume_tokens(letters) == 0


@pytest.mark.parametrize("model", ["qwen", "mistral", "llama"])
def test_whatever_can_be_written_is_read_back(model: str) -> None:
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}
    grammar, rng, num_ended = compiled(model, TOOLS), random.Random(11), 0
    for _ in range(30):
        answer = draw(grammar, rng)
        if not answer.has_ended:
            continue
        num_ended += 1
        reader = format_of(model).parser(schemas, rng)
        text = TOKENIZER.decode(answer.token_ids, skip_special_tokens=False)
        deltas = [*reader.push(text), *reader.flush()]
        assert len(deltas) >= 2
        assert all(isinstance(delta, CallDelta) for delta in deltas)
        for begun, rest in zip(deltas[::2], deltas[1::2], strict=True):
            assert isinstance(begun, CallDelta)
            assert isinstance(rest, CallDelta)
            jsonschema.validate(json.loads(rest.arguments), schemas[begun.name])
    assert num_ended >= 20


def test_a_function_that_is_not_there_cannot_be_called() -> None:
    with pytest.raises(InvalidRequest, match="function 'walk' is none of the tools") as error:
        format_of("qwen").grammar(TOOLS, function="walk")
    assert error.value.field == "tool_choice"
    with pytest.raises(InvalidRequest, match="there are no tools to call"):
        format_of("qwen").grammar([])


def test_a_schema_cannot_set_the_compilers_options() -> None:
    function = {"name": "f", "parameters": {"type": "object", "x-guidance": {"lenient": True}}}
    with pytest.raises(InvalidRequest, match="'f' have x-guidance") as error:
        format_of("qwen").grammar([{"type": "function", "function": function}])
    assert error.value.field == "tools"


def test_a_schema_that_cannot_be_enforced_is_refused() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        compiled("qwen", [{"type": "function", "function": {"name": "f", "parameters": parameters}}])


def test_every_day_tools_compile() -> None:
    grammar = format_of("qwen").grammar([WEATHER, CLOCK])
    assert isinstance(grammar, Grammar)
    assert grammar.kind == "lark"
    assert compiler().compile(grammar).error == ""
