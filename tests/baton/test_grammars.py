from __future__ import annotations

import json
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import pytest

import baton.grammars
from baton.errors import ConfigError, InvalidRequest, ModelError
from baton.grammars import MAX_CACHED_GRAMMARS, MAX_SCHEMA_DEPTH, GrammarCompiler
from baton.sampling import Grammar
from tests.grammar_answers import smollm2, tiny
from tests.router.tiny_text import byte_tokenizer


def nested(depth: int) -> str:
    return '{"items":' * (depth - 1) + "{}" + "}" * (depth - 1)


def test_the_depth_of_a_schema_takes_no_more_memory_than_the_schema() -> None:
    """Many containers under a long name: pointers to all of them would have 800 million characters."""
    schema = json.dumps({"x" * 50_000: [[]] * 12_000})
    tracemalloc.start()
    try:
        tiny().compiler.compile(Grammar(kind="json_schema", source=schema))
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def refusal(kind: str, source: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        tiny().compiler.compile(Grammar(kind=kind, source=source))
    assert caught.value.field == "grammar"
    return caught.value.message


@pytest.mark.parametrize(
    ("source", "place", "reason"),
    [
        ('{"type": "object",\n "properties": }', "at line 2, column 16: ", "Expecting value"),
        ('{"minimum": NaN}', "NaN", "is not JSON"),
        ("[]", "at #: ", "object"),
        ("false", "at #: ", "object"),
        ('{"x-guidance": {"lenient": true}}', "at #/x-guidance: ", "options"),
        ('{"type": "foo"}', "at #: ", "foo"),
        ('{"properties": {"a": {"type": ["string", "foo"]}}}', "at #/properties/a: ", "foo"),
        ('{"properties": {"a/b~c": {"items": {"not": {}}}}}', "at #/properties/a~1b~0c/items: ", '["not"]'),
        ('{"anyOf": [{"type": "null"}, {"uniqueItems": true}]}', "at #/anyOf/1: ", '["uniqueItems"]'),
        (
            '{"properties": {"a": {"type": "string", "pattern": "("}}}',
            "at #/properties/a: ",
            "unclosed group",
        ),
        ('{"$defs": {"d": {"type": "foo"}}, "items": {"$ref": "#/$defs/d"}}', "at #/$defs/d: ", "foo"),
        ('{"items": {"$ref": "#/nope"}}', "at #/items: ", "/nope"),
        ('{"items": {"$ref": "http://example.org/s"}}', "at #/items: ", "example.org"),
        ('{"$ref": "#"}', "at #: ", "no text matches"),
        (nested(MAX_SCHEMA_DEPTH + 1), "/items/items: ", f"more than {MAX_SCHEMA_DEPTH} deep"),
        (nested(5_000), "", f"more than {MAX_SCHEMA_DEPTH} deep"),
    ],
)
def test_a_refused_schema_names_the_place(source: str, place: str, reason: str) -> None:
    message = refusal("json_schema", source)
    assert place in message
    assert reason in message
    assert len(message) < 700


@pytest.mark.parametrize(
    ("source", "place", "reason"),
    [
        ("ab(c", "at column 3: ", "unclosed group"),
        ("a/b\nc\\d(é", "at column 8: ", "unclosed group"),
        ("[z-a]", "at column 2: ", "range"),
        ("x(?=y)", "at column 2: ", "look-around"),
        (r"(a)\1", "at column 4: ", "backreferences"),
        (r"/\q", "at column 2: ", "escape"),
        ("[^\\s\\S]", "", "no text matches"),
    ],
)
def test_a_refused_regex_names_the_column(source: str, place: str, reason: str) -> None:
    message = refusal("regex", source)
    assert place in message
    assert reason in message


@pytest.mark.parametrize(
    ("source", "place", "reason"),
    [
        ('start: "a"\n\n b: ???', "at line 3, column 5: ", "Expected value"),
        ('start: "a" b\nb: missing', "at line 2, column 4: ", "missing"),
        ("start: /(/", "at line 1, column 8: ", "unclosed group"),
        ('start: "a"\nstart: "b"', "at line 2, column 8: ", "duplicate rule"),
        ('start: %json {"type": "foo"}', "at line 1, column 8: ", "foo"),
        ('x: "a"', "", "no start rule"),
        ("start: a\na: a", "", "no text matches"),
        ('{"grammars": [{"lark_grammar": "start: /a/"}]}', "at line 1: ", "not JSON"),
    ],
)
def test_a_refused_lark_grammar_names_line_and_column(source: str, place: str, reason: str) -> None:
    message = refusal("lark", source)
    assert place in message
    assert reason in message


def _doubling(join: str) -> str:
    rules = [f"R{i}: {join.format(f'R{i + 1}', f'R{i + 1}')}" for i in range(40)]
    return "\n".join(["start: R0", *rules, 'R40: "a"'])


_allof = {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(4)]} for i in range(7)]}
HOSTILE = {
    "nested quantifiers": ("regex", "(a{1000}){1000}"),
    "nested deeper": ("regex", "((((a{100}){100}){100}){100})"),
    "a million": ("regex", "a{1000000}"),
    "ambiguous": ("regex", "(x+x+)+y"),
    "exponential automaton": ("regex", "(a|b)*a(a|b){60}"),
    "brackets": ("regex", "(" * 5000 + "a" + ")" * 5000),
    "alternatives": ("regex", "a|" * 40_000 + "b"),
    "enum": ("json_schema", json.dumps({"enum": [f"{i}xxxxxxxxxx" for i in range(5_000)]})),
    "properties": (
        "json_schema",
        json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(1_500)}}),
    ),
    "product of alternatives": ("json_schema", json.dumps(_allof)),
    "loop of references": (
        "json_schema",
        '{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}',
    ),
    "long string": ("json_schema", '{"type": "string", "minLength": 1000000000}'),
    "long array": ("json_schema", '{"type": "array", "minItems": 1000000000}'),
    "multipleOf": ("json_schema", '{"type": "integer", "multipleOf": 7919}'),
    "late fault": (
        "json_schema",
        json.dumps({"properties": {f"p{i}": {} for i in range(4_000)} | {"last": {"type": "foo"}}}),
    ),
    "doubling terminals": ("lark", _doubling("{} {}")),
    "doubling rules": ("lark", _doubling("{} {}").replace("R", "r")),
    "nullable": ("lark", 'start: a\na: a a | "x" | '),
    "repeated": ("lark", 'start: a{100000}\na: "x"{1000}'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_takes_bounded_time(name: str) -> None:
    kind, source = HOSTILE[name]
    begin = time.thread_time()
    outcome = None
    try:
        smollm2().compiler.compile(Grammar(kind=kind, source=source))
    except InvalidRequest as error:
        outcome = error.field
    # Measured: 0.4 s at most, of this thread's own time. Without limits, 4 s.
    assert time.thread_time() - begin < 2
    assert outcome in {None, "grammar"}


def test_a_grammar_is_compiled_once() -> None:
    compiler = tiny().compiler
    first = compiler.compile(Grammar(kind="regex", source="once"))
    assert compiler.compile(Grammar(kind="regex", source="once")) is first
    assert compiler.compile(Grammar(kind="choice", choices=("once",))) is not first


def test_the_oldest_grammars_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tiny().compiler
    first = compiler.compile(Grammar(kind="regex", source="first"))
    for index in range(MAX_CACHED_GRAMMARS):
        compiler.compile(Grammar(kind="regex", source=f"other{index}"))
    assert compiler.num_cached == MAX_CACHED_GRAMMARS
    assert compiler.compile(Grammar(kind="regex", source="first")) is not first
    monkeypatch.setattr(baton.grammars, "MAX_CACHED_CHARS", 10)
    compiler.compile(Grammar(kind="regex", source="12345"))
    compiler.compile(Grammar(kind="regex", source="67890"))
    assert compiler.num_cached == 2


def test_a_grammar_larger_than_the_cache_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton.grammars, "MAX_CACHED_CHARS", 10)
    compiled = tiny().compiler.compile(Grammar(kind="regex", source="longer than ten"))
    assert compiled.error == ""
    assert tiny().compiler.num_cached == 0


def test_threads_share_what_is_compiled() -> None:
    compiler, grammar = tiny().compiler, Grammar(kind="regex", source="shared")
    barrier, found = threading.Barrier(4), []

    def work() -> None:
        barrier.wait()
        found.append(compiler.compile(grammar))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(compiled is found[0] for compiled in found)


def test_a_broken_tokenizer_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{broken")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        GrammarCompiler(path, 300, (1,))
    with pytest.raises(ModelError, match=r"absent\.json"):
        GrammarCompiler(tmp_path / "absent.json", 300, (1,))


def test_a_vocabulary_smaller_than_the_tokenizer_and_a_model_without_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    byte_tokenizer().save(str(path))
    with pytest.raises(ModelError, match="200"):
        GrammarCompiler(path, 200, (1,))
    with pytest.raises(ModelError, match="eos_token_id"):
        GrammarCompiler(path, 300, ())


def test_without_llguidance_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"baton-serve\[router\]"):
        GrammarCompiler(tmp_path / "tokenizer.json", 300, (1,))
