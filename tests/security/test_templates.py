"""Chat templates: what a client writes is never one, and what a model's author writes reaches nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.errors import InvalidRequest
from router.chat_template import ChatTemplate
from router.conversation import Conversation
from tests.router.http.door import door
from tests.router.http.scripted import scripted
from tests.router.tiny_text import ids_of, model_dir

# Those that engines of templates have been taken over by, Jinja's first; each prints what it reached.
CORPUS = [
    "{{ 7 * 7 }}",
    "${7*7}",
    "#{7*7}",
    "<%= 7*7 %>",
    "{% raw %}{{ 7*7 }}{% endraw %}",
    "{{ config.items() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ [].__class__.__base__.__subclasses__()[40]('/etc/passwd').read() }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__.os.system('id') }}",
    "{{ namespace.__init__.__globals__.os.listdir('/') }}",
    "{{ request.application.__globals__.__builtins__.__import__('os').popen('id').read() }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ ''|attr('\\x5f\\x5fclass\\x5f\\x5f') }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '%s'|format(7*7) }}",
    "{{ range.__self__ }}",
    "{{ messages.__class__.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__code__.co_consts }}",
    "{% for c in [].__class__.__base__.__subclasses__() %}{{ c.__name__ }}{% endfor %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.popen('id').read() }}",
    "{% extends '/etc/passwd' %}",
    "{{ url_for.__globals__.os }}",
    "{{ get_flashed_messages.__globals__ }}",
]
ESCAPES = [text for text in CORPUS if "__" in text or "include" in text or "import" in text or "5f" in text]
# What any of them would show, had it got through.
REACHED = ("root:", "uid=", "subclasses", "<class", "built-in", "module", "bin", "function", "49")


def render(folder: Path, template: str, content: str = "a", **arguments: Any) -> str:
    conversation = Conversation(
        messages=[{"role": "user", "content": content}], tools=None, arguments=arguments
    )
    return ChatTemplate(model_dir(folder, template=template), {}).render(conversation)


@pytest.mark.parametrize("text", CORPUS)
def test_what_a_client_writes_is_text(tmp_path: Path, text: str) -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ anything }}"
    assert render(tmp_path / "m", template, text, anything=text) == f"user:{text};{text}"


@pytest.mark.parametrize("template", ESCAPES)
def test_what_a_template_reaches_for_it_does_not_get(tmp_path: Path, template: str) -> None:
    try:
        shown = render(tmp_path / "m", template)
    except InvalidRequest:
        shown = ""
    assert [sign for sign in REACHED if sign in shown] == []


async def test_no_field_of_a_request_is_a_template(tmp_path: Path) -> None:
    text = "{{ 7 * 7 }}"
    async with door(tmp_path) as d:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "return_token_strs": True}
        rendered = (await d.http.post("/tokenize", json=body)).json()
        # <s> of the template, the role, and each byte as it was written.
        assert rendered["tokens"] == [0, *ids_of(f"user:{text};")]
        for field in ("chat_template", "documents", "chat_template_kwargs"):
            refused = await d.http.post(
                "/v1/chat/completions", json={**body, field: {"chat_template": text}, "max_tokens": 1}
            )
            assert refused.status_code == 400, field


async def test_arguments_of_calls_and_tools_are_text_too(tmp_path: Path) -> None:
    seen: list[Any] = []

    async def script(request: Any, call: Any) -> None:
        seen.append(request.chat)

    text = "{{ ''.__class__ }}"
    call = {"id": text, "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": text})}}
    tool = {"type": "function", "function": {"name": "f", "description": text}}
    messages = [{"role": "assistant", "content": text, "tool_calls": [call]}]
    async with scripted(tmp_path, script) as d:
        await d.http.post("/v1/chat/completions", json={"messages": messages, "tools": [tool]})
    (chat,) = seen
    template = (
        "{% for m in messages %}{{ m.tool_calls[0].function.arguments.a }}{% endfor %}{{ tools[0] | tojson }}"
    )
    written = ChatTemplate(model_dir(tmp_path / "m", template=template), {}).render(Conversation.read(chat))
    assert written == text + json.dumps(tool)
