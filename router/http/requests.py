"""Bodies as requests to router/inference.py, and the way back for what is refused there.

Owns which field of a body becomes which field of GenerateRequest. Values are checked where every door's are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from baton.errors import InvalidRequest
from baton.priorities import PRIORITIES
from baton.sampling import Grammar
from baton.v1.inference_service_pb2 import GenerateRequest, TokenIds
from router.http.schema import GenerationBody, ResponseFormat
from router.http.schema_completions import CompletionBody
from router.request import MAX_REQUEST_ID_CHARS

# Those that have the same name and the same meaning.
_SAME: Final = (
    "temperature",
    "top_p",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
    "min_tokens",
    "stop_token_ids",
    "allowed_token_ids",
    "skip_special_tokens",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "ttft_objective_ms",
    "cache_salt",
)
# What a field of GenerateRequest is called in a body.
_NAMES: Final = {
    "text": "prompt",
    "token_ids": "prompt",
    "include_stop_in_text": "include_stop_str_in_output",
}


_PLACE: Final = re.compile(r"(\w+)\[\d+\][\w.\[\]]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a body asks for.

    requests: one per prompt.
    names: what fields of theirs are called in the body.
    """

    requests: list[GenerateRequest]
    names: Mapping[str, str] = field(default_factory=dict)

    def renamed(self, error: InvalidRequest) -> InvalidRequest:
        """The same error, with the field as the client knows it, to the place that the message names."""
        name = self.names.get(error.field, _NAMES.get(error.field, error.field))
        place = _PLACE.match(error.message)
        error.field = place[0] if place and place[1] == name else name
        return error


def completion(body: CompletionBody, request_id: str) -> Asked:
    """The request for each prompt of a body; raises InvalidRequest."""
    prompts = body.prompts()
    if not prompts:
        raise InvalidRequest("prompt is missing", field="prompt")
    names = {"top_logprobs": "logprobs"}
    base = common(body, request_id, names)
    if body.logprobs is not None:
        base.logprobs = True
        base.top_logprobs = body.logprobs
    requests = []
    for number, prompt in enumerate(prompts):
        request = GenerateRequest()
        request.CopyFrom(base)
        if len(prompts) > 1:
            suffix = f"-{number}"
            request.request_id = request_id[: MAX_REQUEST_ID_CHARS - len(suffix)] + suffix
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.CopyFrom(TokenIds(ids=prompt))
        requests.append(request)
    return Asked(requests=requests, names=names)


def common(body: GenerationBody, request_id: str, names: dict[str, str]) -> GenerateRequest:
    """What completions and chats share. names: takes what fields are called here."""
    given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest(
            "prompt_logprobs are not sent in a stream; set stream to false", field="prompt_logprobs"
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream", field="stream_options")
    request = GenerateRequest(model=body.model or "", request_id=request_id, **given)
    if body.max_tokens is not None:
        request.max_tokens = body.max_tokens
    if body.top_k is not None:
        # vLLM's word for all of them is -1.
        request.top_k = 0 if body.top_k == -1 else body.top_k
    if body.seed is not None:
        request.seed = body.seed % 2**64
    if body.stop is not None:
        request.stop.extend([body.stop] if isinstance(body.stop, str) else body.stop)
    request.include_stop_in_text = bool(body.include_stop_str_in_output)
    if isinstance(body.priority, str):
        request.priority = PRIORITIES[body.priority]
    _constrain(request, body, names)
    return request


def _constrain(request: GenerateRequest, body: GenerationBody, names: dict[str, str]) -> None:
    wanted = _wanted(body)
    if len(wanted) > 1:
        raise InvalidRequest(f"{' and '.join(wanted)} exclude each other; give one", field=[*wanted][1])
    for name, (kind, source) in wanted.items():
        names["grammar"] = name
        try:
            grammar = Grammar(kind=kind, **({"choices": source} if kind == "choice" else {"source": source}))
        except InvalidRequest as error:
            error.field = name
            raise
        request.grammar.CopyFrom(grammar.to_proto())


def _wanted(body: GenerationBody) -> dict[str, tuple[str, Any]]:
    """What the answer must be: kind and source of a grammar, by the name of the field that says so."""
    wanted = {
        "guided_json": ("json_schema", _schema(body.guided_json)),
        "guided_regex": ("regex", body.guided_regex),
        "guided_choice": ("choice", body.guided_choice),
        "guided_grammar": ("lark", body.guided_grammar),
        "response_format": ("json_schema", _of_format(body.response_format)),
    }
    if (structured := body.structured_outputs) is not None:
        wanted |= {
            "structured_outputs.json": ("json_schema", _schema(structured.json_)),
            "structured_outputs.json_object": (
                "json_schema",
                _ANY_OBJECT if structured.json_object else None,
            ),
            "structured_outputs.regex": ("regex", structured.regex),
            "structured_outputs.choice": ("choice", structured.choice),
            "structured_outputs.grammar": ("lark", structured.grammar),
        }
    return {name: (kind, source) for name, (kind, source) in wanted.items() if source is not None}


_ANY_OBJECT: Final = '{"type":"object"}'


def _of_format(response_format: ResponseFormat | None) -> str | None:
    """The JSON schema of a response_format; None if it asks for text."""
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return _ANY_OBJECT
    found = response_format.json_schema
    if found is None or found.schema_ is None:
        raise InvalidRequest(
            "response_format.json_schema.schema is missing", field="response_format.json_schema.schema"
        )
    return _schema(found.schema_)


def _schema(schema: Any) -> str | None:
    """A schema as text, in the order of its properties, which is that of the answer."""
    return schema if schema is None or isinstance(schema, str) else json.dumps(schema)
