"""The bytes of single tokens, against transformers and against the bytes that were encoded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from router.token_texts import TokenTexts

TEXTS = [
    "Hello world",
    "  two  blanks",
    "caf\u00e9",
    "\u20ac 5",
    "\U0001f600!",
    "tab\there\n",
    "\u4f60\u597d",
]


def byte_level() -> Tokenizer:
    """GPT-2's manner: merges over the byte alphabet, with a control token and an added one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "He", "ll", "Hell", "Hello", "\u0120w", "or", "\u00c3\u00a9"]
    merges = [
        ("H", "e"),
        ("l", "l"),
        ("He", "ll"),
        ("Hell", "o"),
        ("\u0120", "w"),
        ("o", "r"),
        ("\u00c3", "\u00a9"),
    ]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens([AddedToken("<tool \u00e9>", special=False, normalized=False)])
    return tokenizer


def sentence_piece() -> Tokenizer:
    """Llama 2's manner: blanks as U+2581, and a token per byte for what the vocabulary lacks."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"Helowrdtabsk"]
    words += ["\u2581w", "He", "\u2581Hello"]
    merges = [("\u2581", "w"), ("H", "e")]
    vocab = {word: index for index, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_the_tokens_are_those_of_the_text(make: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = make()
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    joined = b"".join(texts.bytes_of(token_id) for token_id in ids)
    # SentencePiece writes a blank before everything; its decoder takes that one away.
    assert joined.decode() == (f" {text}" if make is sentence_piece else text)


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_a_token_that_is_whole_characters_is_what_transformers_shows(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    texts, reference = TokenTexts(tokenizer), PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    seen = 0
    for token_id in range(tokenizer.get_vocab_size()):
        shown = reference.decode([token_id])
        if "\ufffd" in shown:
            continue
        seen += 1
        own = texts.bytes_of(token_id).decode()
        assert own.removeprefix(" ") == shown if make is sentence_piece else own == shown
    assert seen > 90


def test_control_and_added_tokens_are_text_as_it_stands() -> None:
    tokenizer = byte_level()
    texts = TokenTexts(tokenizer)
    for token in ("<|end|>", "<tool \u00e9>"):
        assert texts.bytes_of(tokenizer.token_to_id(token)) == token.encode()
        assert texts.name_of(tokenizer.token_to_id(token)) == token


def test_an_id_without_a_token_has_no_bytes() -> None:
    # Models pad their vocabularies.
    texts = TokenTexts(byte_level())
    assert (texts.bytes_of(10_000), texts.name_of(10_000)) == (b"", "")
