"""The ways of writing tool calls that are known, and which of them is a model's.

- hermes: <tool_call>{"name", "arguments"}</tool_call> for each call. Hermes 2 and 3, Qwen 2.5 and 3.
- llama3: {"name", "parameters"}, maybe after <|python_tag|>; one call. Llama 3.1 to 3.3.
- mistral: [TOOL_CALLS][{"name", "arguments"}, ...]. Mistral's models up to the third tokenizer.

The chat template tells, for it writes earlier calls as the model writes its own.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from baton.sampling import Grammar
from router.tool_calls.call_grammar import call_grammar
from router.tool_calls.parser import ToolCallParser
from router.tool_calls.syntax import CallSyntax


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """A way of writing calls.

    needs: texts that the template of a model that writes so has, all of them.
    lacks: texts that it has not: others write something else between the same markers.
    """

    syntax: CallSyntax
    needs: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    id_prefix: str = "call_"
    num_id_chars: int = 24

    def is_in(self, template: str) -> bool:
        """Whether a template writes calls so."""
        return all(text in template for text in self.needs) and not any(
            text in template for text in self.lacks
        )


_KNOWN: Mapping[str, _Known] = {
    "hermes": _Known(
        syntax=CallSyntax(
            begin="<tool_call>", end="</tool_call>", opening="{", arguments_keys=("arguments",)
        ),
        needs=("<tool_call>", "</tool_call>", "arguments"),
        # Qwen 3 Coder's, GLM's.
        lacks=("<function=", "<arg_key>"),
    ),
    "llama3": _Known(
        syntax=CallSyntax(
            begin="<|python_tag|>",
            end="",
            opening="{",
            arguments_keys=("parameters", "arguments"),
            is_bare=True,
        ),
        needs=("ipython", '"parameters": '),
    ),
    "mistral": _Known(
        syntax=CallSyntax(begin="[TOOL_CALLS]", end="", opening="[", arguments_keys=("arguments",)),
        needs=("[TOOL_CALLS]",),
        lacks=("[ARGS]",),
        # Its templates refuse any other id.
        id_prefix="",
        num_id_chars=9,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a model writes calls.

    name: "hermes", "llama3" or "mistral".
    syntax: where they stand in its text.
    token_ids: its markers that are tokens of their own.
    special_markers: those that texts without special tokens lack, though calls cannot be told without.
    """

    name: str
    syntax: CallSyntax
    token_ids: Mapping[str, int]
    special_markers: frozenset[str]
    id_prefix: str
    num_id_chars: int

    def parser(self, names: Collection[str], rng: random.Random, *, parallel: bool = True) -> ToolCallParser:
        """A reader of one answer, to a request with functions of these names."""
        return ToolCallParser(
            self.syntax,
            names,
            rng,
            id_prefix=self.id_prefix,
            num_id_chars=self.num_id_chars,
            parallel=parallel,
        )

    def grammar(
        self, tools: Sequence[Mapping[str, Any]], *, function: str = "", parallel: bool = True
    ) -> Grammar:
        """Answers that are calls of these tools, with arguments that match their schemas.

        tools: as tools.read_tools gives them.
        function: the one to call, once; "" allows any of them.
        parallel: several calls may follow each other, where the model writes several.

        Raises InvalidRequest, naming "tool_choice" for a function that is none of the tools.
        """
        return call_grammar(self.syntax, self.token_ids, tools, function=function, parallel=parallel)


def tool_format(template: str, tokenizer: Tokenizer) -> ToolFormat | None:
    """The format of a model with that chat template; None if it is none of those known."""
    found = next((name for name, known in _KNOWN.items() if known.is_in(template)), None)
    if found is None:
        return None
    known = _KNOWN[found]
    added = {token.content: (i, token.special) for i, token in tokenizer.get_added_tokens_decoder().items()}
    markers = [marker for marker in (known.syntax.begin, known.syntax.end) if marker in added]
    # A bare object is a call without its marker.
    special = () if known.syntax.is_bare else (marker for marker in markers if added[marker][1])
    return ToolFormat(
        name=found,
        syntax=known.syntax,
        token_ids={marker: added[marker][0] for marker in markers},
        special_markers=frozenset(special),
        id_prefix=known.id_prefix,
        num_id_chars=known.num_id_chars,
    )
