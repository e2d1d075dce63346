"""Errors as HTTP has them: the one table from Baton's errors to a status, and OpenAI's shape of them.

Knows no request and no connection. docs/http.md has the same table for people.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    UnknownRequest,
)

# For those that may try again and are not told when.
RETRY_S: Final = 1.0
# Of a message; the gRPC door's.
_MOST_CHARS: Final = 2_000
# Whoever wants the first token by a time is not served by the same question at a later one.
_HOPELESS_FIELDS: Final = frozenset({"ttft_objective_ms"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How one kind of error looks.

    status: of HTTP.
    type, code: OpenAI's words for it, where it has any; clients compare them.
    """

    status: int
    type: str
    code: str


class HttpRefusal(InvalidRequest):
    """What only HTTP can get wrong: the path, the method, the type or the length of the body."""

    def __init__(self, message: str, form: Form, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.form = form
        self.headers = dict(headers or {})


_REQUEST: Final = "invalid_request_error"
_SERVER: Final = "server_error"
NOT_FOUND: Final = Form(status=404, type=_REQUEST, code="not_found")
WRONG_METHOD: Final = Form(status=405, type=_REQUEST, code="method_not_allowed")
TOO_LARGE: Final = Form(status=413, type=_REQUEST, code="request_too_large")
WRONG_TYPE: Final = Form(status=415, type=_REQUEST, code="unsupported_media_type")
TWO_LENGTHS: Final = Form(status=400, type=_REQUEST, code="invalid_value")
HEADERS_TOO_LARGE: Final = Form(status=431, type=_REQUEST, code="request_too_large")
# A client that has left reads no status; this is the one that logs of other servers use.
CLIENT_LEFT: Final = 499

# The nearest class above an error decides. What is not here is a fault of ours: 500.
FORMS: Final[Mapping[type[BatonError], Form]] = MappingProxyType(
    {
        InvalidRequest: Form(status=400, type=_REQUEST, code="invalid_value"),
        PromptTooLong: Form(status=400, type=_REQUEST, code="context_length_exceeded"),
        UnknownModel: Form(status=404, type=_REQUEST, code="model_not_found"),
        UnknownRequest: Form(status=404, type=_REQUEST, code="request_not_found"),
        Unauthenticated: Form(status=401, type=_REQUEST, code="invalid_api_key"),
        Overloaded: Form(status=429, type="rate_limit_error", code="rate_limit_exceeded"),
        Unavailable: Form(status=503, type=_SERVER, code="unavailable"),
        Draining: Form(status=503, type=_SERVER, code="draining"),
        DeadlineExceeded: Form(status=504, type="timeout_error", code="deadline_exceeded"),
    }
)


def form_of(error: BatonError) -> Form:
    """The form of an error."""
    if isinstance(error, HttpRefusal):
        return error.form
    found = next((FORMS[kind] for kind in type(error).__mro__ if kind in FORMS), None)
    return found or Form(status=500, type=_SERVER, code=error.code.lower())


def body_of(error: BatonError) -> dict[str, Any]:
    """The object that OpenAI's clients read."""
    form = form_of(error)
    return {
        "error": {
            "message": error.message[:_MOST_CHARS],
            "type": form.type,
            "param": error.field or None,
            "code": form.code,
        }
    }


def headers_of(error: BatonError) -> dict[str, str]:
    """What goes beside it: when to try again, and whether that makes sense at all."""
    headers = dict(error.headers) if isinstance(error, HttpRefusal) else {}
    # OpenAI's clients go by this first: by the status alone they would try again after every 5xx.
    should_retry = error.retryable and error.field not in _HOPELESS_FIELDS
    headers["x-should-retry"] = "true" if should_retry else "false"
    if error.retryable:
        retry_s = RETRY_S if error.retry_after_s is None else error.retry_after_s
        headers["retry-after"] = str(max(1, math.ceil(retry_s)))
        # The whole seconds are the standard's; clients that know this one need not wait for the rest of one.
        headers["retry-after-ms"] = str(max(1, math.ceil(1000 * retry_s)))
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    return headers
