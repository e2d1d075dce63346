"""The OpenAI door as an OpenAPI document, made of the classes that read its bodies."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from router.http.schema_chat import ChatBody
from router.http.schema_completions import CompletionBody
from router.http.schema_tokens import DetokenizeBody, TokenizeBody

BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
PAGES = ("/v1/models", "/v1/models/{name}", "/health", "/ready", "/version", "/metrics")


def document() -> dict[str, Any]:
    """Of every route."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for path, body in BODIES.items():
        made = body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= made.pop("$defs", {})
        schemas[body.__name__] = made
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}
        paths[path] = {
            "post": {
                "requestBody": {"required": True, "content": content},
                "responses": {"200": {"description": ""}},
            }
        }
    for path in PAGES:
        named = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        parameters = [named] if "{" in path else []
        paths[path] = {"get": {"parameters": parameters, "responses": {"200": {"description": ""}}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "baton", "version": "0"},
        "paths": paths,
        "components": {"schemas": schemas},
    }
