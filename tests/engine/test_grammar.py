from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest

import baton.grammars
from baton.errors import InternalError, InvalidRequest
from baton.grammars import CompiledGrammar, GrammarCompiler
from baton.sampling import Grammar
from engine.grammar import GrammarState
from tests.grammar_answers import TINY_VOCAB, Setup, allowed, draw, smollm2, tiny
from tests.router.tiny_text import EOS, byte_tokenizer, ids_of

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"enum": ["Paris", "東京", 'a "quoted" \\ one', None, 7]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-zé😀]{1,4}$"}, "maxItems": 3},
        "note": {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"const": {"k": [1, "x"]}}]},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": -5, "maximum": 5},
                "left": {"$ref": "#/$defs/node"},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
DEEP: dict[str, Any] = {"type": "boolean"}
for _ in range(40):
    DEEP = {"type": "array", "items": DEEP, "minItems": 1, "maxItems": 1}
SCHEMAS = {"person": PERSON, "tree": TREE, "deep": DEEP}
REGEXES = [
    r"[0-9]{3}-[a-f]{2}",
    r"(yes|no|vielleicht), [äöü€]{2,5}!",
    r'a/b\\"[^x\n]{0,4}',
    r"[0-9]{1,3}(\.[0-9]{1,3}){3}",
]
CHOICES = ("yes", "yes, please", "no", 'a "b" \\ c', "line\nfeed", "\x00\x7f", "é東京😀", "</s>", "#/|", " ")
BALANCED = 'start: pair+\npair: "(" pair* ")"'

both = pytest.mark.parametrize("setup", [tiny, smollm2], ids=["bytes", "smollm2"])


def compiled_schema(setup: Setup, schema: object) -> CompiledGrammar:
    return setup.compiler.compile(Grammar(kind="json_schema", source=json.dumps(schema)))


def answers(setup: Setup, compiled: CompiledGrammar, count: int) -> list[str]:
    rng = random.Random(count)
    drawn = [draw(compiled, rng) for _ in range(count)]
    ended = [answer for answer in drawn if answer.has_ended]
    assert len(ended) >= count // 2
    return [setup.tokenizer.decode(answer.token_ids, skip_special_tokens=False) for answer in ended]


@both
@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_under_a_schema_are_valid(setup: Any, name: str) -> None:
    schema = SCHEMAS[name]
    validator = jsonschema.Draft202012Validator(schema)
    for text in answers(setup(), compiled_schema(setup(), schema), 12):
        assert list(validator.iter_errors(json.loads(text))) == []


@both
def test_properties_come_in_the_order_of_the_schema(setup: Any) -> None:
    order = list(PERSON["properties"])
    for text in answers(setup(), compiled_schema(setup(), PERSON), 12):
        keys = list(json.loads(text))
        assert keys == sorted(keys, key=order.index)


@both
def test_whitespace_is_one_space_or_one_line_break(setup: Any) -> None:
    for text in answers(setup(), compiled_schema(setup(), PERSON), 12):
        assert text == text.strip()
        without_strings = re.sub(r'"(?:\\.|[^"\\])*"', '""', text)
        for run in re.findall(r"\s+", without_strings):
            assert re.fullmatch(r" |\r?\n[ \t]{0,64}", run)


@both
@pytest.mark.parametrize("source", ["{}", "true"])
def test_the_empty_schema_is_any_json(setup: Any, source: str) -> None:
    compiled = setup().compiler.compile(Grammar(kind="json_schema", source=source))
    rng = random.Random(5)
    ended = [answer for _ in range(20) if (answer := draw(compiled, rng, most_tokens=40)).has_ended]
    assert ended
    for answer in ended:
        json.loads(setup().tokenizer.decode(answer.token_ids, skip_special_tokens=False))


@both
@pytest.mark.parametrize("source", REGEXES)
def test_answers_under_a_regex_match_it_whole(setup: Any, source: str) -> None:
    compiled = setup().compiler.compile(Grammar(kind="regex", source=source))
    for text in answers(setup(), compiled, 12):
        assert re.fullmatch(source, text)


@both
def test_answers_under_choices_are_choices_and_every_choice_can_be_reached(setup: Any) -> None:
    compiled = setup().compiler.compile(Grammar(kind="choice", choices=CHOICES))
    drawn = set(answers(setup(), compiled, 300))
    assert drawn == set(CHOICES)


@both
def test_answers_under_a_lark_grammar_derive_from_it(setup: Any) -> None:
    compiled = setup().compiler.compile(Grammar(kind="lark", source=BALANCED))
    for text in answers(setup(), compiled, 20):
        # Brackets are balanced if removing "()" again and again leaves nothing.
        rest = text
        while "()" in rest:
            rest = rest.replace("()", "")
        assert text
        assert rest == ""


@both
@pytest.mark.parametrize("schema", [PERSON, {}], ids=["person", "empty"])
def test_a_resume_at_every_position_has_the_same_mask(setup: Any, schema: object) -> None:
    compiled = compiled_schema(setup(), schema)
    rng = random.Random(3)
    answer = max((draw(compiled, rng, most_tokens=60) for _ in range(8)), key=lambda drawn: len(drawn.masks))
    assert len(answer.masks) >= 10
    for index, mask in enumerate(answer.masks):
        resumed = GrammarState.of(compiled, answer.token_ids[:index])
        np.testing.assert_array_equal(resumed.mask().bits(), mask)


def test_padded_ids_are_never_allowed_and_the_mask_covers_them() -> None:
    bits = GrammarState.of(tiny().compiler.compile(Grammar(kind="regex", source="(.|\n)*"))).mask().bits()
    assert (bits.dtype, bits.shape) == (np.uint32, (-(-TINY_VOCAB // 32),))
    assert max(allowed(bits)) < byte_tokenizer().get_vocab_size()
    # A vocabulary that fills its last word.
    bits = GrammarState.of(smollm2().compiler.compile(Grammar(kind="regex", source="(.|\n)*"))).mask().bits()
    assert bits.shape == (49_152 // 32,)


def test_an_answer_is_complete_when_nothing_can_follow() -> None:
    compiled = tiny().compiler.compile(Grammar(kind="regex", source="ab"))
    state = GrammarState.of(compiled)
    steps = []
    for token_id in ids_of("ab"):
        steps.append((allowed(state.mask().bits()), state.is_complete))
        state.advance(token_id)
    assert steps == [(ids_of("a"), False), (ids_of("b"), False)]
    assert state.is_complete
    assert allowed(state.mask().bits()) == [EOS]


def test_json_is_complete_at_its_last_bracket_and_a_number_is_not() -> None:
    compiled = compiled_schema(smollm2(), {"type": "object", "properties": {}, "additionalProperties": False})
    ids = smollm2().tokenizer.encode("{}", add_special_tokens=False).ids
    assert GrammarState.of(compiled, ids).is_complete
    number = compiled_schema(smollm2(), {"type": "integer"})
    ids = smollm2().tokenizer.encode("12", add_special_tokens=False).ids
    assert not GrammarState.of(number, ids).is_complete


def test_every_end_of_sequence_id_is_allowed_where_the_answer_may_end() -> None:
    compiled = smollm2().compiler.compile(Grammar(kind="regex", source="7*"))
    ids = allowed(GrammarState.of(compiled).mask().bits())
    assert {0, 2} < set(ids)
    for eos in (0, 2):
        ended = GrammarState.of(compiled, [max(ids), eos])
        assert ended.is_complete


@pytest.mark.parametrize(
    ("options", "num_tokens", "may_end"),
    [
        ({}, 0, True),
        ({"min_tokens": 2}, 0, False),
        ({"min_tokens": 2}, 1, False),
        ({"min_tokens": 2}, 2, True),
        ({"ignore_eos": True}, 5, False),
    ],
)
def test_min_tokens_and_ignore_eos_keep_the_end_away(
    options: dict[str, Any], num_tokens: int, may_end: bool
) -> None:
    compiled = tiny().compiler.compile(Grammar(kind="regex", source="a*"))
    state = GrammarState.of(compiled, ids_of("a" * num_tokens), **options)
    assert allowed(state.mask().bits()) == ([EOS] if may_end else []) + ids_of("a")


def test_where_only_the_end_is_allowed_it_stays_allowed() -> None:
    compiled = tiny().compiler.compile(Grammar(kind="lark", source='start: ""'))
    state = GrammarState.of(compiled, ignore_eos=True, min_tokens=9)
    assert allowed(state.mask().bits()) == [EOS]


def test_tokens_that_do_not_match_cannot_be_resumed() -> None:
    compiled = tiny().compiler.compile(Grammar(kind="regex", source="abc"))
    with pytest.raises(InvalidRequest, match="token 2 of the answer so far") as caught:
        GrammarState.of(compiled, ids_of("abd"))
    assert caught.value.field == "grammar"


def test_a_token_that_was_sampled_against_the_grammar_is_our_defect() -> None:
    state = GrammarState.of(tiny().compiler.compile(Grammar(kind="regex", source="abc")))
    state.advance(ids_of("x")[0])
    assert not state.is_complete
    with pytest.raises(InternalError, match="token 0"):
        state.mask().bits()


def test_advancing_drops_a_mask_that_nobody_took() -> None:
    state = GrammarState.of(tiny().compiler.compile(Grammar(kind="regex", source="abc")))
    stale = state.mask()
    state.advance(ids_of("a")[0])
    assert state.mask() is not stale
    assert allowed(state.mask().bits()) == ids_of("b")
    with pytest.raises(RuntimeError):
        stale.bits()


class TestFullLexer:
    """(a|b)*a(a|b){60} has about 2**60 states; a lexer may hold 500 here."""

    @pytest.fixture
    def compiled(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> CompiledGrammar:
        monkeypatch.setattr(baton.grammars, "_MAX_LEXER_STATES", 500)
        byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
        compiler = GrammarCompiler(tmp_path / "tokenizer.json", TINY_VOCAB, (EOS,))
        return compiler.compile(Grammar(kind="regex", source="(a|b)*a(a|b){60}"))

    def test_the_answer_that_fills_it_fails_by_name(self, compiled: CompiledGrammar) -> None:
        with pytest.raises(InvalidRequest, match=r"too complex after \d+ tokens") as caught:
            self.run(GrammarState.of(compiled), 2_000, seed=1)
        assert caught.value.field == "grammar"

    def test_other_answers_go_on_with_the_same_masks(self, compiled: CompiledGrammar) -> None:
        neighbour = GrammarState.of(compiled, ids_of("ab"))
        before = neighbour.mask().bits()
        with pytest.raises(InvalidRequest):
            self.run(GrammarState.of(compiled), 2_000, seed=1)
        neighbour.advance(ids_of("a")[0])
        np.testing.assert_array_equal(neighbour.mask().bits(), before)
        self.run(GrammarState.of(compiled), 50, seed=2)

    def run(self, state: GrammarState, num_tokens: int, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(num_tokens):
            state.mask().bits()
            state.advance(rng.choice(ids_of("ab")))
