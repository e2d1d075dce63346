"""A model's chat template: messages in, the text that its tokenizer is to read out.

Renders as transformers' apply_chat_template does, in an immutable sandbox: a
template comes with the weights and may not reach Python. It has no clock
(`strftime_now` is undefined, as templates must expect), so that every router
renders the same text on every day. Knows no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.errors import InvalidRequest, ModelError
from baton.models import ModelDir

MAX_MESSAGES = 1_000


class ChatTemplate:
    """The compiled template; rendering is safe from any thread.

    special_tokens: the variables "bos_token", "eos_token" and so on.
    Raises ModelError, naming the folder, for a template that cannot be read.
    """

    def __init__(self, model: ModelDir, special_tokens: Mapping[str, str]) -> None:
        self.source = model.chat_template or ""
        self._special_tokens = dict(special_tokens)
        try:
            self._template = None if model.chat_template is None else _environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"{model.path}: the chat template cannot be read ({error}); pull the model again"
            ) from error

    def check(self, messages: Sequence[Mapping[str, str]]) -> None:
        """Raises InvalidRequest if there is no template, or not a number of messages that it can take."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template; send text instead", field="chat")
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise InvalidRequest(
                f"the chat has {len(messages)} messages; send between 1 and {MAX_MESSAGES}", field="chat"
            )

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation as the template writes it, up to the assistant's turn; raises InvalidRequest."""
        self.check(messages)
        assert self._template is not None
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            # What a template's own arithmetic raises over these messages is its refusal too.
            raise InvalidRequest(f"the chat template refused the messages: {error}", field="chat") from error


class _GenerationBlock(Extension):
    """{% generation %} marks the assistant's words for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    # jinja2's own escapes for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
