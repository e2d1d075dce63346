"""Text in and out: characters that span tokens, special tokens, templates."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from baton.errors import InvalidRequest, ModelError
from router.text import INLINE_CHARS, Text
from tests.router.tiny_text import BOS, EOS, at_once, ids_of, model_dir


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(model_dir(tmp_path_factory.mktemp("models") / "tiny"), at_once)


@pytest.mark.parametrize("answer", ["plain words", "naïve café", "日本語", "a👩‍👩‍👧b", "  two  spaces "])
def test_token_by_token_the_text_is_whole(text: Text, answer: str) -> None:
    stream = text.stream()
    parts = [stream.push([token_id]) for token_id in ids_of(answer)]
    assert "".join(parts) + stream.flush() == answer
    assert not any("�" in part for part in parts)


def test_a_character_comes_with_its_last_token(text: Text) -> None:
    stream = text.stream()
    assert [stream.push([token_id]) for token_id in ids_of("é")] == ["", "é"]


def test_several_tokens_at_once_make_the_same_text(text: Text) -> None:
    stream = text.stream()
    ids = ids_of("日本語")
    assert stream.push(ids[:4]) + stream.push(ids[4:]) + stream.flush() == "日本語"


def test_an_incomplete_character_shows_at_the_end_only(text: Text) -> None:
    stream = text.stream()
    assert [stream.push([token_id]) for token_id in ids_of("a日")[:-1]] == ["a", "", ""]
    assert stream.flush() == "�"


def test_special_tokens_are_left_out(text: Text) -> None:
    stream = text.stream()
    assert stream.push([BOS, *ids_of("ab"), EOS]) + stream.flush() == "ab"


async def test_long_texts_are_encoded_like_short_ones_but_off_the_loop(tmp_path: Path) -> None:
    threads: list[int] = []

    def traced(work: Callable[[], list[int]]) -> list[int]:
        threads.append(threading.get_ident())
        return work()

    text = Text(model_dir(tmp_path / "tiny"), partial(asyncio.to_thread, traced))
    short = "ab" * (INLINE_CHARS // 2)
    assert await text.encode(short, 10**6) == [BOS, *ids_of(short)]
    assert threads == []
    long = short + "c"
    assert await text.encode(long, 10**6) == [BOS, *ids_of(long)]
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


async def test_without_a_template_a_chat_is_refused(tmp_path: Path) -> None:
    plain = Text(model_dir(tmp_path / "plain", template=None), at_once)
    with pytest.raises(InvalidRequest, match="no chat template; send text instead") as error:
        await plain.encode_chat([{"role": "user", "content": "a"}], 64)
    assert error.value.field == "chat"


def test_the_words_of_a_template_that_refuses_reach_the_client(text: Text) -> None:
    with pytest.raises(InvalidRequest, match="unknown role judge"):
        text.render([{"role": "judge", "content": "a"}])


def test_a_damaged_template_is_refused_by_folder(tmp_path: Path) -> None:
    model = model_dir(tmp_path / "damaged", template="{% for message in messages %}")
    with pytest.raises(ModelError, match="damaged: the chat template cannot be read"):
        Text(model, at_once)


def test_a_damaged_tokenizer_is_refused_by_file(tmp_path: Path) -> None:
    model = model_dir(tmp_path / "damaged")
    model.tokenizer_path.write_text('{"version": "1.0"}')
    with pytest.raises(ModelError, match=r"damaged/tokenizer\.json is not a readable tokenizer"):
        Text(model, at_once)


def test_a_template_cannot_reach_python(tmp_path: Path) -> None:
    template = "{{ messages.__class__.__mro__ }}{{ messages.append(1) }}"
    sly = Text(model_dir(tmp_path / "sly", template=template), at_once)
    with pytest.raises(InvalidRequest):
        sly.render([{"role": "user", "content": "a"}])
