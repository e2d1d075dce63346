"""Errors on the wire and back: the one translation."""

from __future__ import annotations

from baton.errors import BY_CODE, BatonError, InternalError
from baton.v1 import common_pb2


def to_failure(error: BatonError) -> common_pb2.Failure:
    """The wire form of an error."""
    retry_ms = 0 if error.retry_after_s is None else max(1, round(error.retry_after_s * 1000))
    return common_pb2.Failure(
        code=error.code, message=error.message, field=error.field, retry_after_ms=retry_ms
    )


def from_failure(failure: common_pb2.Failure) -> BatonError:
    """The error a wire form stands for; an unknown code becomes InternalError."""
    cls = BY_CODE.get(failure.code, InternalError)
    retry_after_s = failure.retry_after_ms / 1000 if failure.retry_after_ms else None
    return cls(failure.message, field=failure.field, retry_after_s=retry_after_s)
