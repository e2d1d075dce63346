"""What templates may use, as transformers lets them, and what they may not."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from baton.errors import InvalidRequest
from router.chat_template import ChatTemplate
from router.conversation import Conversation
from tests.router.tiny_text import model_dir

MESSAGES = [{"role": "user", "content": "a <b> é"}, {"role": "assistant", "content": "c"}]
CONVERSATION = Conversation(messages=MESSAGES, tools=None, arguments={})


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m | tojson }}{% endfor %}",
        "{{ messages | tojson(indent=2) }}",
        "{% if tools is not none %}tools{% endif %}{% if documents %}documents{% endif %}x",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "  {% for m in messages %}\n  {{ m.content }}\n  {% endfor %}\n{{ bos_token }}",
        "{{ messages[0].content.split(' ')[-1] }}{% if add_generation_prompt %}go{% endif %}",
    ],
    ids=["break", "tojson", "indent", "no-tools", "generation", "namespace", "blocks", "methods"],
)
def test_templates_render_as_in_transformers(tmp_path: Path, template: str) -> None:
    ours = ChatTemplate(model_dir(tmp_path / "m", template=template), {"bos_token": "<s>"})
    (theirs,), _ = render_jinja_template(
        [MESSAGES], chat_template=template, add_generation_prompt=True, bos_token="<s>"
    )
    assert ours.render(CONVERSATION) == theirs


def test_a_template_has_no_clock(tmp_path: Path) -> None:
    template = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}a day{% endif %}"
    assert ChatTemplate(model_dir(tmp_path / "m", template=template), {}).render(CONVERSATION) == "a day"


@pytest.mark.parametrize(
    "template", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"]
)
def test_a_template_changes_nothing_and_reaches_nothing(tmp_path: Path, template: str) -> None:
    with pytest.raises(InvalidRequest, match="refused"):
        ChatTemplate(model_dir(tmp_path / "m", template=template), {}).render(CONVERSATION)


def test_what_a_template_cannot_compute_is_the_requests_fault(tmp_path: Path) -> None:
    template = "{{ messages[0]['content'][0] + 1 }}"
    with pytest.raises(InvalidRequest, match="chat template refused") as error:
        ChatTemplate(model_dir(tmp_path / "m", template=template), {}).render(CONVERSATION)
    assert error.value.field == "chat"
