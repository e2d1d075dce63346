"""Compiles the languages that constrain an answer, for the router's check and the workers' masks.

Owns: the tokenizer as llguidance knows it, the cache of compiled grammars, and the limits that
keep a hostile grammar from hanging a process or eating its memory. Knows neither numpy nor
torch; engine/grammar.py holds what belongs to one request.

What a grammar means:

- json_schema: properties come in the schema's order. Between two JSON tokens stands nothing, one
  space, or one line break with at most 64 spaces or tabs; nothing stands before the first token or after
  the last. A keyword that cannot be enforced is refused, never ignored.
- regex: the whole answer matches it (Rust syntax: no look-around, no back-references).
- lark: the whole answer derives from `start` (llguidance's dialect of Lark).
- choice: the answer is one of the texts.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.errors import ConfigError, InvalidRequest, ModelError
from baton.grammar_errors import lark_reason, regex_reason, schema_reason
from baton.sampling import Grammar
from baton.schema_places import SchemaPlaces, place_too_deep

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions

# Containers inside containers; the JSON reader of llguidance gives up at 128, wrappers included.
MAX_SCHEMA_DEPTH = 100
MAX_CACHED_GRAMMARS = 32
# Of all cached sources together: four of the largest.
MAX_CACHED_CHARS = 400_000
# About 50,000 units are spent per millisecond. A fifth of llguidance's default: nested quantifiers that took
# 1 to 3 s and 180 MB take 0.2 s at most.
_INITIAL_FUEL = 200_000
# About 14,000 units are spent per millisecond: the bound on one mask.
_STEP_FUEL = 200_000
# Of 1 to 2 kB each, kept as long as the compiled grammar is.
_MAX_LEXER_STATES = 20_000
_MAX_GRAMMAR_SYMBOLS = 200_000
JSON_OPTIONS: JsonCompileOptions = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_pattern": r"[ ]|\r?\n[ \t]{0,64}",
    "coerce_one_of": False,
    "lenient": False,
}


class CompiledGrammar:
    """A grammar that is known to be sound, and where new matchers of it come from.

    Matchers share one lexer, which learns states as it meets new text and is in error for all of
    them once it holds 20,000; `renew` starts again. Thread-safe; one matcher is not.

    eos_token_ids: ids that a matcher allows where an answer may end.
    """

    def __init__(self, compiler: GrammarCompiler, source: str) -> None:
        self._compiler = compiler
        self._source = source
        self.eos_token_ids = compiler.eos_token_ids
        self.vocab_size = compiler.vocab_size
        self._matcher = compiler.matcher_of(source)

    @property
    def error(self) -> str:
        """Why the grammar cannot be used, in llguidance's words; "" if it can.

        Computes the first mask: what is expensive is often found only there.
        """
        matcher = self.matcher()
        if not matcher.is_error():
            matcher.compute_bitmask()
        return (matcher.get_error() or matcher.stop_reason()) if matcher.is_error() else ""

    def matcher(self) -> LLMatcher:
        """A matcher at the beginning of an answer, in about a microsecond."""
        return self._matcher.deep_copy()

    def is_complete(self, token_ids: Sequence[int]) -> bool:
        """Whether these are an answer that nothing can follow."""
        matcher = self.matcher()
        matcher.try_consume_tokens(list(token_ids))
        if matcher.is_error():
            # Other answers may have filled the lexer that all share.
            matcher = self.renew()
            matcher.try_consume_tokens(list(token_ids))
        return bool(matcher.is_stopped() and not matcher.is_error())

    def renew(self) -> LLMatcher:
        """A matcher with a lexer that it shares with nobody, and another lexer for later matchers to share.

        Costs two compilations.
        """
        self._matcher = self._compiler.matcher_of(self._source)
        return self._compiler.matcher_of(self._source)


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and remembers the latest. Thread-safe; compiling frees the GIL.

    tokenizer_json: the model's tokenizer.json.
    vocab_size: of the model; ids that the tokenizer lacks are never allowed.
    eos_token_ids: all ids that end an answer; at least one.

    Takes about 0.5 s and 60 MB for a vocabulary of 49,152. Raises ConfigError if llguidance is not installed,
    ModelError if the tokenizer cannot be used.
    """

    def __init__(self, tokenizer_json: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        try:
            import llguidance  # noqa: PLC0415  (the SDK is installed without it)
        except ImportError as error:
            raise ConfigError(
                "structured output needs llguidance; install baton-serve[router] or baton-serve[worker]",
                field="grammar",
            ) from error
        if not eos_token_ids:
            raise ModelError(
                f"the model of {tokenizer_json} names no end-of-sequence token, which a grammar needs to end "
                "an answer; set eos_token_id in its config.json"
            )
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size = vocab_size
        self._llguidance = llguidance
        self._limits = llguidance.LLParserLimits(
            initial_lexer_fuel=_INITIAL_FUEL,
            step_lexer_fuel=_STEP_FUEL,
            max_lexer_states=_MAX_LEXER_STATES,
            max_grammar_size=_MAX_GRAMMAR_SYMBOLS,
            verbose_errors=False,
        )
        self._tokenizer = self._read(tokenizer_json)
        self._lock = threading.Lock()
        self._cache: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._cached_chars = 0

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The compiled grammar, made now or remembered.

        Takes about a millisecond for an everyday schema and 0.5 to 0.9 s for the worst that the limits
        let through; call it away from the event loop. Raises InvalidRequest, naming the place and what is
        wrong there.
        """
        with self._lock:
            if grammar in self._cache:
                self._cache.move_to_end(grammar)
                return self._cache[grammar]
        compiled = getattr(self, f"_compile_{grammar.kind}")(grammar)
        assert isinstance(compiled, CompiledGrammar)
        return self._remember(grammar, compiled)

    @property
    def num_cached(self) -> int:
        """Compiled grammars that are remembered."""
        return len(self._cache)

    def matcher_of(self, source: str) -> LLMatcher:
        """A new matcher with a lexer of its own, from source in llguidance's form; may be in error."""
        return self._llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)

    def _read(self, path: Path) -> Any:
        try:
            return self._llguidance.LLTokenizer(
                path.read_text(encoding="utf-8"), n_vocab=self.vocab_size, eos_token=list(self.eos_token_ids)
            )
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be used for grammars ({error}); pull the model again") from error

    def _remember(self, grammar: Grammar, compiled: CompiledGrammar) -> CompiledGrammar:
        with self._lock:
            if grammar not in self._cache:
                self._cache[grammar] = compiled
                self._cached_chars += _num_chars(grammar)
            # Two threads may have compiled the same; all use the first, whose lexer learns for all.
            found = self._cache[grammar]
            while len(self._cache) > MAX_CACHED_GRAMMARS or self._cached_chars > MAX_CACHED_CHARS:
                oldest, _ = self._cache.popitem(last=False)
                self._cached_chars -= _num_chars(oldest)
            return found

    def _compile_json_schema(self, grammar: Grammar) -> CompiledGrammar:
        schema = _read_schema(grammar.source)
        # Options can be given for an object only; {} is the object that says what true says.
        compiled = self._from_schema("{}" if schema is True else grammar.source)
        if reason := compiled.error:
            places = SchemaPlaces(schema, lambda trial: self._from_schema(json.dumps(trial)).error)
            raise _refused("JSON schema", schema_reason(reason, places.find(reason)))
        return compiled

    def _from_schema(self, source: str) -> CompiledGrammar:
        text = self._llguidance.LLMatcher.grammar_from_json_schema(source, overrides=JSON_OPTIONS)
        return CompiledGrammar(self, text)

    def _compile_regex(self, grammar: Grammar) -> CompiledGrammar:
        compiled = CompiledGrammar(self, self._llguidance.LLMatcher.grammar_from_regex(grammar.source))
        if reason := compiled.error:
            raise _refused("regex", regex_reason(reason, grammar.source, self._llguidance.regex_to_lark))
        return compiled

    def _compile_lark(self, grammar: Grammar) -> CompiledGrammar:
        # llguidance would read JSON as a grammar of its own format, past the checks made here.
        if grammar.source.lstrip().startswith("{"):
            raise _refused("Lark grammar", "at line 1: a rule is expected, not JSON")
        compiled = CompiledGrammar(self, self._llguidance.LLMatcher.grammar_from_lark(grammar.source))
        if reason := compiled.error:
            raise _refused("Lark grammar", lark_reason(reason))
        return compiled

    def _compile_choice(self, grammar: Grammar) -> CompiledGrammar:
        # A string of Lark is a string of JSON; pure ASCII, because it knows no bare control character.
        lark = "start: " + " | ".join(map(json.dumps, grammar.choices))
        compiled = CompiledGrammar(self, self._llguidance.LLMatcher.grammar_from_lark(lark))
        if reason := compiled.error:
            raise _refused("list of choices", lark_reason(reason))
        return compiled


def _num_chars(grammar: Grammar) -> int:
    return len(grammar.source) + sum(map(len, grammar.choices))


def _refused(what: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"the {what} cannot be used: {reason}", field="grammar")


def _read_schema(source: str) -> Any:
    try:
        schema = json.loads(source, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise _refused("JSON schema", f"at line {error.lineno}, column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        deep = f"it is nested more than {MAX_SCHEMA_DEPTH} deep"
        raise _refused("JSON schema", deep) from error
    if not isinstance(schema, dict) and schema is not True:
        raise _refused("JSON schema", "at #: it must be an object, or true")
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise _refused("JSON schema", "at #/x-guidance: options of the compiler cannot be set by a request")
    if place := place_too_deep(schema, MAX_SCHEMA_DEPTH):
        deep = f"it is nested more than {MAX_SCHEMA_DEPTH} deep"
        raise _refused("JSON schema", schema_reason(deep, place))
    return schema


def _no_constant(name: str) -> None:
    raise _refused("JSON schema", f"{name} is not JSON")
