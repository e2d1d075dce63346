"""Small chat templates in the manner of models that call tools, and a tokenizer with their control tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from baton.models import ModelDir
from router.text import Text
from tests.router.tiny_text import at_once, byte_tokenizer, model_dir

# Like Qwen 2.5's: tools in the system turn, calls as JSON between markers, results as the user's.
QWEN = """{%- if tools %}<|im_start|>system
{%- if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% endif %}
# Tools <tools>
{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
</tools>
<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
  {%- if message.role in ('user', 'system') or (message.role == 'assistant' and not message.tool_calls) %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
  {%- elif message.role == 'assistant' %}
    {{- '<|im_start|>assistant' }}
    {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
    {%- for tool_call in message.tool_calls %}
      {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
      {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
      {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
    {%- endfor %}{{- '<|im_end|>\\n' }}
  {%- elif message.role == 'tool' %}
    {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n' }}{%- endif %}
{%- if note is defined %}{{ note }}{% endif %}"""

# Like Llama 3.1's: tools indented in the user's turn, one call a turn, results as JSON whatever they are.
LLAMA = """{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today Date: " + date_string + "<|eot_id|>" }}
{%- for message in messages %}
  {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if loop.first and tools_in_user_message and not tools is none %}
      {{- 'Respond in the format {"name": function name, "parameters": dictionary of arguments}.' }}
      {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {%- endif %}
    {{- message['content'] | trim + '<|eot_id|>' }}
  {%- elif 'tool_calls' in message %}
    {%- if not message.tool_calls|length == 1 %}
      {{- raise_exception("This model only supports single tool-calls at once!") }}
    {%- endif %}
    {%- set tool_call = message.tool_calls[0].function %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
    {{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}
    {{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
  {%- elif message.role == "tool" or message.role == "ipython" %}
    {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
    {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
    {%- else %}{{- message.content }}{%- endif %}
    {{- "<|eot_id|>" }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# Like Mistral's: a list of calls, with ids of nine characters, which are cut into the JSON.
MISTRAL = """{{- bos_token }}
{%- for message in messages %}
  {%- if message.role == 'user' %}
    {%- if tools is not none and loop.first %}
      {{- "[AVAILABLE_TOOLS] [" }}
      {%- for tool in tools %}{%- set tool = tool.function %}
        {{- '{"type": "function", "function": {' }}
        {%- for key, val in tool.items() if key != "return" %}
          {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
          {%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
          {%- if not loop.last %}{{- ", " }}{%- endif %}
        {%- endfor %}{{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- endif %}
      {%- endfor %}{{- "][/AVAILABLE_TOOLS]" }}
    {%- endif %}
    {{- "[INST] " + message.content + "[/INST]" }}
  {%- elif message.tool_calls is defined and message.tool_calls is not none %}
    {{- "[TOOL_CALLS] [" }}
    {%- for tool_call in message.tool_calls %}
      {%- set out = tool_call.function|tojson %}{{- out[:-1] }}
      {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
        {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
      {%- endif %}
      {{- ', "id": "' + tool_call.id + '"}' }}{%- if not loop.last %}{{- ", " }}{%- endif %}
    {%- endfor %}{{- "]" + eos_token }}
  {%- elif message.role == 'assistant' %}{{- " " + message.content + eos_token }}
  {%- elif message.role == 'tool' %}
    {{- '[TOOL_RESULTS] {"content": ' + message.content|tojson }}
    {{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
  {%- endif %}
{%- endfor %}"""

# Like Hermes': definitions written by a macro, roles as they are.
HERMES = """{%- macro type_of(spec) %}{{ spec.type | default('any') }}{%- endmacro %}
{{- bos_token }}{%- if tools %}{{- '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{%- set f = tool.function %}
  {{- f.name + '(' }}
  {%- for name, spec in f.parameters.properties | items %}
    {{- name + ': ' + type_of(spec) + ', ' }}
  {%- endfor %}
  {{- '): ' + f.description + ' ' + (f | tojson) + '\\n' }}
{%- endfor %}{{- '</tools><|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
  {{- '<|im_start|>' + message.role + '\\n' }}
  {%- if message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response>
  {%- else %}{{ message.content }}{% endif %}
  {%- for call in message.tool_calls | default([]) %}
    {{- '<tool_call>\\n{"arguments": ' + (call.function.arguments | tojson) }}
    {{- ', "name": "' + call.function.name + '"}\\n</tool_call>' }}
  {%- endfor %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

TEMPLATES = {"qwen": QWEN, "llama": LLAMA, "mistral": MISTRAL, "hermes": HERMES}
FORMATS = {"qwen": "hermes", "llama": "llama3", "mistral": "mistral", "hermes": "hermes"}

SPECIAL = [
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|python_tag|>",
    ),
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    # As Gemma's, which JSON has to escape.
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", '<|"|>'),
]
# Added tokens that are no special ones, as Qwen's.
ADDED = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Weather of a city, é "quoted"',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "where"},
                "days": {"type": "integer", "minimum": 1, "maximum": 1.5e3},
                "unit": {"enum": ["C", "F", None, True, 3]},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "description": "", "parameters": {"type": "object", "properties": {}}},
}


def tool_tokenizer() -> Tokenizer:
    tokenizer = byte_tokenizer(with_bos=False)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    return tokenizer


def open_text(folder: Path, template: str) -> tuple[Text, Any]:
    """The text of a model with that template, and transformers' tokenizer of the same."""
    model = model_dir(folder, template=template)
    tool_tokenizer().save(str(model.tokenizer_path))
    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(specials))
    reference = PreTrainedTokenizerFast(tokenizer_file=str(model.tokenizer_path), **specials)
    reference.chat_template = template
    return Text(ModelDir.open(folder), at_once), reference


def by_transformers(reference: Any, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    ids: list[int] = reference.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, **options
    )
    return ids


def call(name: str, arguments: dict[str, Any], call_id: str = "abcdefghi") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
