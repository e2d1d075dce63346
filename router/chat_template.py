"""A model's chat template: messages in, the text that its tokenizer is to read out.

Renders as transformers' apply_chat_template does, in an immutable sandbox: a
template comes with the weights and may not reach Python. It has no clock
(`strftime_now` is undefined, as templates must expect), so that every router
renders the same text on every day. Knows no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.errors import InvalidRequest, ModelError
from baton.models import ModelDir
from router.conversation import Conversation


class ChatTemplate:
    """A model's compiled template, or two, one of them for chats with tools. Safe from any thread.

    source: Jinja source of all there is; "" if there is none.
    special_tokens: the variables "bos_token", "eos_token" and so on.
    Raises ModelError, naming the folder, for a template that cannot be read.
    """

    def __init__(self, model: ModelDir, special_tokens: Mapping[str, str]) -> None:
        self._given = frozenset({"messages", "tools", "add_generation_prompt", *special_tokens})
        self._special_tokens = dict(special_tokens)
        try:
            self._plain = None if model.chat_template is None else _Source(model.chat_template)
            self._with_tools = self._plain if model.tool_template is None else _Source(model.tool_template)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"{model.path}: the chat template cannot be read ({error}); pull the model again"
            ) from error
        self.source = (model.chat_template or "") + (model.tool_template or "")

    def check_present(self) -> None:
        """Raises InvalidRequest if there is no template."""
        self._chosen(has_tools=False)

    def render(self, conversation: Conversation) -> str:
        """The conversation as the template writes it, up to the assistant's turn; raises InvalidRequest."""
        chosen = self._chosen(has_tools=conversation.tools is not None)
        self._check(chosen, conversation)
        variables = {
            "messages": conversation.messages,
            "tools": conversation.tools,
            "documents": None,
            "add_generation_prompt": True,
            **self._special_tokens,
            **conversation.arguments,
        }
        try:
            return chosen.template.render(variables)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            # What a template's own arithmetic raises over these messages is its refusal too.
            raise InvalidRequest(f"the chat template refused the messages: {error}", field="chat") from error

    def _chosen(self, *, has_tools: bool) -> _Source:
        chosen = self._with_tools if has_tools else self._plain
        if chosen is None or self._plain is None:
            raise InvalidRequest("this model has no chat template; send text instead", field="chat")
        return chosen

    def _check(self, source: _Source, conversation: Conversation) -> None:
        """Raises InvalidRequest for what the template would pass over in silence."""
        if conversation.tools is not None and "tools" not in source.variables:
            raise InvalidRequest("this model's chat template takes no tools; leave them out", field="tools")
        if not source.takes_calls and any("tool_calls" in message for message in conversation.messages):
            without = "" if source is self._with_tools else " without tools"
            raise InvalidRequest(f"this model's chat template takes no tool calls{without}", field="chat")
        for name in conversation.arguments:
            if name in self._given:
                raise InvalidRequest(
                    f"template_arguments cannot set {name!r}: the request does", field="template_arguments"
                )
            if name not in source.variables:
                takes = ", ".join(sorted(source.variables - self._given)) or "none"
                raise InvalidRequest(
                    f"this model's chat template has no variable {name!r}; it has: {takes}",
                    field="template_arguments",
                )


class _Source:
    """A template and what it looks at.

    variables: names that it takes from whoever renders it.
    takes_calls: whether it looks for tool calls in messages.
    """

    def __init__(self, source: str) -> None:
        environment = _environment()
        self.template = environment.from_string(source)
        undeclared = meta.find_undeclared_variables(environment.parse(source))
        self.variables = frozenset(undeclared - environment.globals.keys())
        self.takes_calls = "tool_calls" in source


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
