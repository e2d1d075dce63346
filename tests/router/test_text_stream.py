"""Pieces of text against the whole, for each manner of tokenizer, on random ids."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from router.text_stream import TextStream
from router.token_texts import TokenTexts
from tests.router.tiny_text import byte_tokenizer

# Llama 2's and Mistral's: the decoder drops the first blank. Gemma's does not.
EMOJI = ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
BLANKS = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]


def byte_fallback(decoder: object) -> Tokenizer:
    words = ["\u2581", "a", "\u2581the", "\u2581\u2581", "\u00e9", "\u65e5", "!", "\u2581."]
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(models.Unigram([(name, -1.0) for name in names], 0, byte_fallback=True))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    return tokenizer


def llama2() -> Tokenizer:
    return byte_fallback(decoders.Sequence([*BLANKS, decoders.Strip(" ", 1, 0)]))


def gemma() -> Tokenizer:
    return byte_fallback(decoders.Sequence(BLANKS))


def metaspace() -> Tokenizer:
    return byte_fallback(decoders.Metaspace())


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "the": 3, "\ufffd": 4}))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(["[CLS]"])
    return tokenizer


def pieces(tokenizer: Tokenizer, ids: list[int], *, skip: bool) -> list[str]:
    stream = TextStream(TokenTexts(tokenizer), skip_special_tokens=skip)
    return [*(stream.push([token_id]) for token_id in ids), stream.flush()]


def random_ids(tokenizer: Tokenizer, seed: int) -> list[int]:
    """Half of them of whole texts, that were cut somewhere; and some that the tokenizer lacks."""
    rng = random.Random(seed)
    if seed % 2:
        text = "".join(rng.choices(["\u65e5", "\u00e9", " ", "a", "\U0001f600", "!", "\n"], k=8))
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids[rng.randrange(3) : rng.randrange(len(ids) + 1)]
    return [rng.randrange(tokenizer.get_vocab_size() + 2) for _ in range(rng.randrange(1, 25))]


def by_hand(tokenizer: Tokenizer, ids: list[int], *, skip: bool) -> str:
    """The rule: all bytes in a row as UTF-8. No word begins within a character: none joins a stray one."""
    special = {"<s>", "</s>"} if skip else set()
    names = [tokenizer.id_to_token(token_id) or "" for token_id in ids]
    data = b""
    for name in names:
        if name not in special:
            data += bytes([int(name[3:5], 16)]) if name.startswith("<0x") else name.encode()
    return data.decode("utf-8", "replace").replace("\u2581", " ")


@pytest.mark.parametrize("make", [byte_tokenizer, llama2, gemma, metaspace, word_piece])
@pytest.mark.parametrize("skip", [True, False])
def test_the_pieces_of_whole_characters_are_what_the_tokenizer_writes(
    make: Callable[[], Tokenizer], skip: bool
) -> None:
    tokenizer, num_compared = make(), 0
    for seed in range(600):
        ids = random_ids(tokenizer, seed)
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        joined = "".join(pieces(tokenizer, ids, skip=skip))
        # Only a run of bytes that is no UTF-8 is shown in another way, and only where each byte is a token.
        if make in (byte_tokenizer, word_piece) or "\ufffd" not in whole:
            num_compared += 1
            assert joined == whole, ids
    assert num_compared > 100


@pytest.mark.parametrize("make", [llama2, gemma])
@pytest.mark.parametrize("skip", [True, False])
def test_random_bytes_keep_the_characters_among_them(make: Callable[[], Tokenizer], skip: bool) -> None:
    tokenizer = make()
    for seed in range(0, 2000, 2):
        ids = random_ids(tokenizer, seed)
        expected = by_hand(tokenizer, ids, skip=skip)
        if make is llama2:
            expected = expected.removeprefix(" ")
        assert "".join(pieces(tokenizer, ids, skip=skip)) == expected, ids


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["<0x0A>", "<0xF0>", "a"], ["\n", "", "\ufffda", ""]),
        ([*EMOJI, "<0xF0>", "a"], ["", "", "", "\U0001f600", "", "\ufffda", ""]),
        (["a", "<0xE2>", "</s>", "<0x82>", "<0xAC>"], ["a", "", "", "", "\u20ac", ""]),
        (["a", "\u2581the", "<0xE2>", "<0x82>"], ["a", " the", "", "", "\ufffd"]),
        (["\u2581the", "\u2581the"], ["the", " the", ""]),
        (["<0x20>", "\u2581the"], ["", " the", ""]),
    ],
)  # fmt: skip
def test_bytes_and_words_piece_by_piece(names: list[str], expected: list[str]) -> None:
    tokenizer = llama2()
    assert pieces(tokenizer, [tokenizer.token_to_id(name) for name in names], skip=True) == expected


def test_an_answer_that_never_completes_a_character_costs_no_more_than_another() -> None:
    """Each step looks at a few tokens, however many there were: the square of 40,000 would take hours."""
    for tokenizer, name in ((byte_tokenizer(), "\u00ff"), (llama2(), "<0xFF>"), (word_piece(), "\ufffd")):
        stream = TextStream(TokenTexts(tokenizer))
        token_id = tokenizer.token_to_id(name)
        text = "".join(stream.push([token_id]) for _ in range(40_000)) + stream.flush()
        assert text.count("\ufffd") == 40_000
