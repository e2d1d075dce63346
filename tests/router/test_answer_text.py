"""Tokens to text, up to a stop, going on where another router ended."""

from __future__ import annotations

import random

import pytest

from router.answer_text import AnswerText, TextOptions
from router.stops import StopAutomaton
from router.text_stream import TextStream
from router.token_texts import TokenTexts
from tests.router.tiny_text import EOS, byte_tokenizer, ids_of

TEXTS = TokenTexts(byte_tokenizer())
ANSWER = "naïve \N{HIRAGANA LETTER A}END of it"


def answer(*stops: str, include: bool = False, skip: bool = True, **options: int) -> AnswerText:
    text = TextOptions(
        stops=StopAutomaton(stops) if stops else None, include_stop=include, skip_special_tokens=skip
    )
    return AnswerText(TextStream(TEXTS, skip_special_tokens=skip), text, **options)


def test_tokens_count_up_to_the_one_that_completes_the_stop() -> None:
    text = answer("END")
    assert text.push(ids_of(ANSWER)) == "naïve あ"
    assert (text.matched_stop, text.num_tokens) == ("END", len("naïve あEND".encode()))
    assert text.flush() == ""


def test_the_stop_can_stay() -> None:
    text = answer("END", include=True)
    assert text.push(ids_of(ANSWER)) == "naïve あEND"
    assert text.matched_stop == "END"


def test_what_could_have_become_a_stop_comes_at_the_end() -> None:
    text = answer("END")
    assert text.push(ids_of("the EN")) == "the "
    assert text.flush() == "EN"
    assert text.matched_stop == ""


def test_an_incomplete_character_can_complete_a_stop_at_the_end() -> None:
    text = answer("a\N{REPLACEMENT CHARACTER}")
    assert text.push(ids_of("a日")[:-1]) == ""
    assert text.flush() == ""
    assert text.matched_stop == "a\N{REPLACEMENT CHARACTER}"


def test_the_first_min_tokens_are_not_searched() -> None:
    text = answer("ab", min_tokens=3)
    # Neither the first "ab" nor the one that begins there.
    assert text.push(ids_of("ababab")) == "abab"
    assert (text.matched_stop, text.num_tokens) == ("ab", 6)


@pytest.mark.parametrize(("skip", "shown"), [(True, "ab"), (False, "a</s>b")])
def test_special_tokens_are_left_out_unless_wanted(skip: bool, shown: str) -> None:
    text = answer(skip=skip)
    assert text.push([*ids_of("a"), EOS, *ids_of("b")]) + text.flush() == shown


@pytest.mark.parametrize("stops", [(), ("END",), ("o", "END of"), ("zzz", "of it!")])
def test_at_another_router_the_text_goes_on_where_it_was(stops: tuple[str, ...]) -> None:
    ids, rng = ids_of(ANSWER), random.Random(4)
    whole = answer(*stops)
    expected = whole.push(ids) + whole.flush()
    for cut in range(len(ids) + 1):
        first = answer(*stops)
        delivered = first.push(ids[:cut])
        # The last text may have been lost on the way, or the rest of it may have come.
        known = delivered + first.flush() if cut == len(ids) else delivered[: rng.randint(0, len(delivered))]
        second = answer(*stops, num_delivered_chars=len(known))
        second.replay(ids[: first.num_tokens])
        text = second.push(ids[first.num_tokens :]) + second.flush()
        assert known + text == expected
        assert (second.matched_stop, second.num_tokens) == (whole.matched_stop, whole.num_tokens)
