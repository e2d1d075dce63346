"""Calls are read out of text however it is cut; what is no call comes through as it was."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.tool_calls import CallDelta, ContentDelta, ToolCallParser, tool_format
from router.tool_calls.deltas import Delta
from tests.router.tool_templates import FORMATS, TEMPLATES, tool_tokenizer

NAMES = ["get_weather", "clock"]
WEATHER = '{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}'
CLOCK = '{"name": "clock", "arguments": {}}'
BARE = '{"name": "get_weather", "parameters": {"city": "Zürich", "days": 2}}'
BARE_CLOCK = '{"name": "clock", "parameters": {}}'
ZURICH = ("get_weather", {"city": "Zürich", "days": 2})
NOW = ("clock", {})


def parser(model: str, *, names: list[str] = NAMES, parallel: bool = True) -> ToolCallParser:
    found = tool_format(TEMPLATES[model], tool_tokenizer())
    assert found is not None
    return found.parser(names, random.Random(3), parallel=parallel)


def content(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))


def calls(deltas: list[Delta]) -> list[tuple[str, object]]:
    """Name and arguments of each call, put together as clients do."""
    found: list[tuple[str, str]] = []
    for delta in deltas:
        if isinstance(delta, CallDelta):
            if delta.name:
                assert (delta.index, delta.arguments, bool(delta.id)) == (len(found), "", True)
                found.append((delta.name, ""))
            else:
                assert (delta.index, delta.id) == (len(found) - 1, "")
                found[-1] = (found[-1][0], found[-1][1] + delta.arguments)
    return [(name, json.loads(arguments)) for name, arguments in found]


def read(reader: ToolCallParser, pieces: list[str]) -> list[Delta]:
    return [delta for piece in pieces for delta in reader.push(piece)] + reader.flush()


CASES = {
    "plain": ("qwen", "no call {at} all", "no call {at} all", []),
    "one": ("qwen", f"<tool_call>\n{WEATHER}\n</tool_call>", "", [ZURICH]),
    "after-text": ("qwen", f"I look.\n<tool_call>\n{WEATHER}\n</tool_call>", "I look.\n", [ZURICH]),
    "two": (
        "qwen",
        f"<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>{CLOCK}</tool_call>\n",
        "",
        [ZURICH, NOW],
    ),
    "between": (
        "qwen",
        f"a<tool_call>{WEATHER}</tool_call> then <tool_call>{CLOCK}</tool_call>.",
        "a then .",
        [ZURICH, NOW],
    ),
    "marker-in-string": (
        "qwen",
        '<tool_call>{"name": "clock", "arguments": {"a": "</tool_call>{\\"}"}}</tool_call>',
        "",
        [("clock", {"a": '</tool_call>{"}'})],
    ),
    "other-order": (
        "hermes",
        '<tool_call>\n{"arguments": {"city": "x"}, "name": "get_weather"}\n</tool_call>',
        "",
        [("get_weather", {"city": "x"})],
    ),
    "line-break-in-string": (
        "qwen",
        '<tool_call>{"name": "clock", "arguments": {"a": "x\ny"}}</tool_call>',
        "",
        [("clock", {"a": "x\ny"})],
    ),
    "unknown": ("qwen", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', None, []),
    "no-json": ("qwen", "<tool_call>\nclock()\n</tool_call>", None, []),
    "bad-json": ("qwen", '<tool_call>{"name": "clock", "arguments": {,}}</tool_call>', None, []),
    "text-arguments": ("qwen", '<tool_call>{"name": "clock", "arguments": "{}"}</tool_call>', None, []),
    "brace-too-many": ("qwen", f"<tool_call>{CLOCK}}}</tool_call>", None, []),
    "too-deep": (
        "qwen",
        f'<tool_call>{{"name": "clock", "arguments": {{"a": {"[" * 200}{"]" * 200}}}}}</tool_call>',
        None,
        [],
    ),
    "endless-number": ("qwen", '<tool_call>{"name":"clock","arguments":{"a":1e999}}</tool_call>', None, []),
    "broken-then-whole": (
        "qwen",
        f'<tool_call>{{"name"<tool_call>{CLOCK}</tool_call>',
        '<tool_call>{"name"',
        [NOW],
    ),
    "no-end": ("qwen", f"<tool_call>\n{CLOCK}\n", "", [NOW]),
    "half-an-end": ("qwen", f"<tool_call>\n{CLOCK}\n</tool", "", [NOW]),
    "cut": ("qwen", '<tool_call>\n{"name": "clock", "argu', None, []),
    "only-a-marker": ("qwen", "well <tool_call>", None, []),
    "white-space": ("qwen", " \n\n", " \n\n", []),
    "list": ("mistral", f"[TOOL_CALLS] [{WEATHER}, {CLOCK}]", "", [ZURICH, NOW]),
    "list-after-text": ("mistral", f"So: [TOOL_CALLS][{CLOCK}]", "So: ", [NOW]),
    "list-with-one-bad": ("mistral", f"[TOOL_CALLS][{CLOCK}, 3]", None, []),
    "empty-list": ("mistral", "[TOOL_CALLS][]", None, []),
    "bare": ("llama", BARE, "", [ZURICH]),
    "bare-typed": ("llama", f'{{"type": "function", {BARE_CLOCK[1:]}', "", [NOW]),
    "bare-after-space": ("llama", f"\n\n{BARE}", "", [ZURICH]),
    "tagged": ("llama", f"<|python_tag|>{BARE}", "", [ZURICH]),
    "several": ("llama", f"{BARE}; {BARE_CLOCK}", "", [ZURICH, NOW]),
    "arguments": ("llama", CLOCK, "", [NOW]),
    "space-around": ("qwen", f"\n\n<tool_call>{CLOCK}</tool_call>so", "so", [NOW]),
    "inside-text": ("llama", f"like {BARE}", None, []),
    "other-object": ("llama", '{"city": "x"} is it', None, []),
    "other-name": ("llama", '{"name": "Bob", "parameters": {}}', None, []),
    "code": ("llama", "<|python_tag|>print(1)", None, []),
    "after-bare": ("llama", f"{BARE_CLOCK}; done", "; done", [NOW]),
}


@pytest.mark.parametrize("case", CASES)
def test_calls_and_text_are_told_apart(case: str) -> None:
    model, text, said, called = CASES[case]
    deltas = read(parser(model), [text])
    assert content(deltas) == (text if said is None else said)
    assert calls(deltas) == called


@pytest.mark.parametrize("case", CASES)
def test_however_the_text_is_cut_the_result_is_the_same(case: str) -> None:
    model, text, said, called = CASES[case]
    cuts = [[text[:place], text[place:]] for place in range(len(text))]
    for pieces in [list(text), *cuts]:
        deltas = read(parser(model), pieces)
        assert content(deltas) == (text if said is None else said)
        assert calls(deltas) == called


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<tool", "[TOOL", "<|py"),
    *(
        WEATHER,
        CLOCK,
        BARE,
        BARE_CLOCK,
        f"[{CLOCK}]",
        '{"name": "clock", ',
        '"arguments": {}}',
        "{",
        "}",
        "[",
    ),
    *("]", '"', "\\", "\n", " ", ";", "x", "é"),
]


@settings(max_examples=150, deadline=None)
@given(
    model=st.sampled_from(sorted(FORMATS)),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    seed=st.integers(0, 2**32),
)
def test_random_texts_do_not_depend_on_their_cuts(model: str, fragments: list[str], seed: int) -> None:
    text, rng = "".join(fragments), random.Random(seed)
    places = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
    bounds = [0, *places, len(text)]
    pieces = [text[start:stop] for start, stop in itertools.pairwise(bounds)]
    whole, cut = read(parser(model), [text]), read(parser(model), pieces)
    assert (content(cut), calls(cut)) == (content(whole), calls(whole))


@settings(max_examples=150, deadline=None)
@given(
    model=st.sampled_from(sorted(FORMATS)),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
)
def test_where_no_function_is_offered_nothing_is_lost(model: str, fragments: list[str]) -> None:
    deltas = read(parser(model, names=[]), list("".join(fragments)))
    assert content(deltas) == "".join(fragments)
    assert calls(deltas) == []


@pytest.mark.parametrize(("model", "marker"), [("qwen", "<tool_call>"), ("mistral", "[TOOL_CALLS]")])
@pytest.mark.parametrize(
    "text", ["plain words", "a < b, [x] <tool [TOOL", "x<<tool_<tool_calls", "x[[TOOL_CALL)"]
)
def test_only_what_could_become_a_marker_waits(model: str, marker: str, text: str) -> None:
    reader, said = parser(model), ""
    for place, char in enumerate(text, start=1):
        said += content(reader.push(char))
        begun = max(n for n in range(len(marker)) if text[:place].endswith(marker[:n]))
        assert said == text[: place - begun]


@pytest.mark.parametrize(
    ("text", "known_at"),
    [('{"city": "x"}', 3), ('{"nam": 1}', 6), ("{}", 2), ("{ 1", 3), ("{" + " " * 70, 65)],
)
def test_an_object_that_is_no_call_passes_as_soon_as_that_is_known(text: str, known_at: int) -> None:
    reader, said = parser("llama"), ""
    for place, char in enumerate(text, start=1):
        said += content(reader.push(char))
        assert said == (text[:place] if place >= known_at else "")


def test_one_call_where_several_are_not_wanted() -> None:
    text = f"<tool_call>{WEATHER}</tool_call><tool_call>{CLOCK}</tool_call> and so on"
    reader = parser("qwen", parallel=False)
    deltas = read(reader, [text])
    assert (content(deltas), calls(deltas), reader.num_calls) == (" and so on", [ZURICH], 1)


def test_ids_are_of_the_shape_that_templates_take_and_drawn_anew() -> None:
    two = {
        "qwen": f"<tool_call>{WEATHER}</tool_call><tool_call>{CLOCK}</tool_call>",
        "mistral": f"[TOOL_CALLS][{WEATHER}, {CLOCK}]",
    }
    shapes = {"qwen": r"call_[a-zA-Z0-9]{24}", "mistral": r"[a-zA-Z0-9]{9}"}
    for model, text in two.items():
        deltas = read(parser(model), [text])
        ids = [delta.id for delta in deltas if isinstance(delta, CallDelta) and delta.id]
        assert len(set(ids)) == 2
        assert all(re.fullmatch(shapes[model], call_id) for call_id in ids)


def test_half_a_pair_of_surrogates_stays_an_escape() -> None:
    deltas = read(parser("qwen"), ['<tool_call>{"name":"clock","arguments":{"a":"\\ud800é"}}</tool_call>'])
    written = "".join(delta.arguments for delta in deltas if isinstance(delta, CallDelta))
    assert written.encode().isascii()
    assert json.loads(written) == {"a": "\ud800é"}


@pytest.mark.parametrize(
    "fragment", ["<tool_call>", "<tool_call>{", '<tool_call>{"', '<tool_call>{"a": "\\"']
)
def test_markers_without_calls_take_no_time(fragment: str) -> None:
    """20,000 of them: work that grew with the square of their number would not end."""
    text = fragment * 20_000
    assert content(read(parser("qwen"), [text])) == text
