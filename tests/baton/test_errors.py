"""The error tree: its codes, its wire form, and that nothing gets lost on the way."""

from __future__ import annotations

import grpc
import pytest

from baton import errors
from baton.errors import BY_CODE, BatonError, ConfigError, InternalError
from baton.failure import from_failure, to_failure
from baton.v1 import common_pb2

# Code, gRPC status and whether a client should try again, as the documentation promises them.
PROMISED = {
    "INVALID_REQUEST": ("INVALID_ARGUMENT", False),
    "CONTEXT_LENGTH_EXCEEDED": ("INVALID_ARGUMENT", False),
    "UNKNOWN_MODEL": ("NOT_FOUND", False),
    "UNKNOWN_REQUEST": ("NOT_FOUND", False),
    "UNAUTHENTICATED": ("UNAUTHENTICATED", False),
    "OVERLOADED": ("RESOURCE_EXHAUSTED", True),
    "UNAVAILABLE": ("UNAVAILABLE", True),
    "DRAINING": ("UNAVAILABLE", True),
    "PEER_LOST": ("UNAVAILABLE", True),
    "KV_TRANSFER_FAILED": ("UNAVAILABLE", True),
    "DEADLINE_EXCEEDED": ("DEADLINE_EXCEEDED", False),
    "CANCELLED": ("CANCELLED", False),
    "NON_FINITE_LOGITS": ("INTERNAL", False),
    "POISON_REQUEST": ("INTERNAL", False),
    "INCOMPLETE_ANSWER": ("OUT_OF_RANGE", False),
    "INCOMPATIBLE_PEER": ("FAILED_PRECONDITION", False),
    "MODEL_ERROR": ("FAILED_PRECONDITION", False),
    "CONFIG_ERROR": ("INVALID_ARGUMENT", False),
    "INTERNAL": ("INTERNAL", False),
}


def test_the_tree_is_the_promised_one() -> None:
    named = {code: (cls.status, cls.retryable) for code, cls in BY_CODE.items() if cls is not BatonError}
    assert named == PROMISED


def test_every_error_of_the_module_has_a_code_of_its_own() -> None:
    classes = [
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, BatonError)
    ]
    assert len({cls.code for cls in classes}) == len(classes)


@pytest.mark.parametrize("cls", BY_CODE.values(), ids=BY_CODE.keys())
def test_the_wire_keeps_everything(cls: type[BatonError]) -> None:
    sent = to_failure(cls("what and why", field="top_p", retry_after_s=1.5)).SerializeToString()
    error = from_failure(common_pb2.Failure.FromString(sent))
    assert type(error) is cls
    assert (error.message, error.field, error.retry_after_s) == ("what and why", "top_p", 1.5)
    assert hasattr(grpc.StatusCode, cls.status)


def test_no_hint_stays_no_hint_and_a_tiny_one_stays_one() -> None:
    assert from_failure(to_failure(errors.Overloaded("x"))).retry_after_s is None
    assert from_failure(to_failure(errors.Overloaded("x", retry_after_s=0.0))).retry_after_s == 0.001


def test_an_unknown_code_is_an_internal_error() -> None:
    error = from_failure(common_pb2.Failure(code="FROM_THE_FUTURE", message="news"))
    assert type(error) is InternalError
    assert error.message == "news"


def test_a_config_error_is_a_value_error_too() -> None:
    with pytest.raises(ValueError, match="bad port"):
        raise ConfigError("bad port", field="port")
