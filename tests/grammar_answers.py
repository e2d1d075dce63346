"""Compilers for two tokenizers, and random answers drawn under a grammar's masks."""

from __future__ import annotations

import functools
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from baton.grammars import CompiledGrammar, GrammarCompiler
from baton.pull import pull
from engine.grammar import GrammarState
from engine.token_mask import UInt32Array
from tests.router.tiny_text import EOS, byte_tokenizer

# The tiny tokenizer has 258 tokens; its model's vocabulary is padded.
TINY_VOCAB = 300


@dataclass(frozen=True)
class Setup:
    """A compiler, and the tokenizer as the tokenizers library reads it."""

    compiler: GrammarCompiler
    tokenizer: Tokenizer


@functools.cache
def tiny() -> Setup:
    """One token per byte."""
    tokenizer = byte_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        tokenizer.save(str(path))
        return Setup(GrammarCompiler(path, TINY_VOCAB, (EOS,)), tokenizer)


@functools.cache
def smollm2() -> Setup:
    """SmolLM2's tokenizer; ids 0 and 2 both end an answer here."""
    model = pull("smollm2-135m-instruct", lambda *_: None).model
    compiler = GrammarCompiler(model.tokenizer_path, model.vocab_size, (2, 0))
    return Setup(compiler, Tokenizer.from_file(str(model.tokenizer_path)))


def allowed(bits: UInt32Array) -> list[int]:
    """The ids of a mask, bit by bit from the lowest."""
    found: list[int] = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
    return found


@dataclass
class Answer:
    """What was drawn: the tokens, without an end-of-sequence id, and the mask before each of them."""

    token_ids: list[int] = field(default_factory=list)
    masks: list[UInt32Array] = field(default_factory=list)
    has_ended: bool = False


def draw(compiled: CompiledGrammar, rng: random.Random, *, most_tokens: int = 600) -> Answer:
    """A random answer: ends at every second chance, or when it is complete."""
    answer, state = Answer(), GrammarState.of(compiled)
    while len(answer.token_ids) < most_tokens:
        bits = state.mask().bits()
        answer.masks.append(bits)
        is_allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")
        eos = list(compiled.eos_token_ids)
        may_end = bool(is_allowed[eos].any())
        is_allowed[eos] = 0
        others = np.flatnonzero(is_allowed)
        if not len(others) or (may_end and rng.random() < 0.5):
            answer.has_ended = True
            break
        answer.token_ids.append(int(others[rng.randrange(len(others))]))
        state.advance(answer.token_ids[-1])
        if state.is_complete:
            answer.has_ended = True
            break
    return answer
