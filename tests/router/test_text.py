"""Text in and out: characters that span tokens, special tokens, templates."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton.errors import InvalidRequest, ModelError
from router.text import INLINE_CHARS, Text
from tests.router.tiny_text import BOS, EOS, at_once, chat_of, ids_of, model_dir


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
        await plain.encode_chat(chat_of([{"role": "user", "content": "a"}]), 64)
    assert error.value.field == "chat"


async def test_the_words_of_a_template_that_refuses_reach_the_client(text: Text) -> None:
    with pytest.raises(InvalidRequest, match="unknown role tool"):
        await text.encode_chat(chat_of([{"role": "tool", "content": "a"}]), 64)


def test_a_damaged_template_is_refused_by_folder(tmp_path: Path) -> None:
    model = model_dir(tmp_path / "damaged", template="{% for message in messages %}")
    with pytest.raises(ModelError, match="damaged: the chat template cannot be read"):
        Text(model, at_once)


def test_a_damaged_tokenizer_is_refused_by_file(tmp_path: Path) -> None:
    model = model_dir(tmp_path / "damaged")
    model.tokenizer_path.write_text('{"version": "1.0"}')
    with pytest.raises(ModelError, match=r"damaged/tokenizer\.json is not a readable tokenizer"):
        Text(model, at_once)


async def test_a_template_cannot_reach_python(tmp_path: Path) -> None:
    template = "{{ messages.__class__.__mro__ }}{{ messages.append(1) }}"
    sly = Text(model_dir(tmp_path / "sly", template=template), at_once)
    with pytest.raises(InvalidRequest):
        await sly.encode_chat(chat_of([{"role": "user", "content": "a"}]), 64)


@pytest.mark.parametrize("prompt", ["hi", "<s>hi", "<s><s><s>hi"])
async def test_a_text_has_one_bos_however_many_it_says(text: Text, prompt: str) -> None:
    assert await text.encode(prompt, 64) == [BOS, *ids_of("hi")]


async def test_control_text_in_a_text_prompt_is_control_tokens(text: Text) -> None:
    assert await text.encode("a</s>b", 64) == [BOS, *ids_of("a"), EOS, *ids_of("b")]


async def test_threads_share_the_tokenizers(tmp_path: Path) -> None:
    """64 threads, 200 calls each, encoding and decoding texts of many lengths."""
    text = Text(model_dir(tmp_path / "tiny"), at_once)
    samples = ["a</s>b" * 3, "日本語", "x" * 60, "", "naïve café " * 4]
    chats = [chat_of([{"role": "user", "content": sample}]) for sample in samples]
    encoded = [[BOS, *_with_eos(sample)] for sample in samples]
    rendered = [[BOS, *ids_of(f"user:{sample};")] for sample in samples]

    def work(seed: int) -> int:
        rng = random.Random(seed)
        for _ in range(200):
            index = rng.randrange(len(samples))
            match rng.randrange(3):
                case 0:
                    assert at_end(text.encode(samples[index], 10**6)) == encoded[index]
                case 1:
                    assert at_end(text.encode_chat(chats[index], 10**6)) == rendered[index]
                case _:
                    stream, ids = text.stream(), ids_of(samples[index])
                    assert stream.push(ids) + stream.flush() == samples[index]
        return 200

    with ThreadPoolExecutor(64) as pool:
        assert sum(pool.map(work, range(64))) == 64 * 200


def at_end(work: Coroutine[Any, Any, list[int]]) -> list[int]:
    """What a coroutine that never waits returns; no loop needed."""
    try:
        work.send(None)
    except StopIteration as end:
        ids: list[int] = end.value
        return ids
    raise AssertionError("it waits")


def _with_eos(sample: str) -> list[int]:
    first, *others = sample.split("</s>")
    return [*ids_of(first), *(token_id for other in others for token_id in (EOS, *ids_of(other)))]
