"""The errors Baton raises.

    BatonError
    |-- InvalidRequest       INVALID_ARGUMENT     no retry   the request is wrong; names the field
    |   |-- PromptTooLong    INVALID_ARGUMENT     no retry   the prompt does not fit the model's context
    |   |-- UnknownModel     NOT_FOUND            no retry
    |   `-- UnknownRequest   NOT_FOUND            no retry   asked about, and not known here, or not any more
    |-- Unauthenticated      UNAUTHENTICATED      no retry   the caller did not show who it is
    |-- Overloaded           RESOURCE_EXHAUSTED   retry      a queue is full, or a limit reached
    |-- Unavailable          UNAVAILABLE          retry      no worker can serve this now
    |   |-- Draining         UNAVAILABLE          retry      the process is leaving; nobody is at fault
    |   |-- PeerLost         UNAVAILABLE          retry      a session ended, by reset or by silence
    |   `-- KvTransferFailed UNAVAILABLE          retry      the KV did not arrive intact
    |-- DeadlineExceeded     DEADLINE_EXCEEDED    no retry   the caller's time is up
    |-- Cancelled            CANCELLED            no retry   the caller gave up
    |-- PoisonRequest        INTERNAL             no retry   workers die of it, also when it runs alone
    |-- NonFiniteLogits      INTERNAL             no retry   the model produced NaN or infinity
    |-- IncompleteAnswer     OUT_OF_RANGE         no retry   an answer ended before its JSON did; has the text
    |-- IncompatiblePeer     FAILED_PRECONDITION  no retry   fingerprints differ; names the field
    |-- ModelError           FAILED_PRECONDITION  no retry   a model folder cannot be used; names the file
    |-- ConfigError          INVALID_ARGUMENT     no retry   a setting is unknown or wrong (also a ValueError)
    `-- InternalError        INTERNAL             no retry   ours to mend

baton/failure.py is their form on the wire. Foreign exceptions are translated at the edge where
they appear (baton/rpc.py for gRPC, baton/redis_client.py for Redis), nowhere else.
"""

from __future__ import annotations

from typing import ClassVar


class BatonError(Exception):
    """Base of every error Baton raises on purpose.

    Attributes:
        code: stable name, the same on every wire.
        status: name of the gRPC status code.
        retryable: whether the same request may succeed later.
        field: request field at fault, or "".
        retry_after_s: when to try again, in seconds, or None.
        request_id: of the generation that failed, where the SDK knows it; otherwise "".
    """

    code: ClassVar[str] = "ERROR"
    status: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, field: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
        self.request_id = ""


class InvalidRequest(BatonError):
    """The request is wrong; `field` names the part to change."""

    code = "INVALID_REQUEST"
    status = "INVALID_ARGUMENT"


class PromptTooLong(InvalidRequest):
    """The prompt does not fit the model's context; shorten it, or have it truncated."""

    code = "CONTEXT_LENGTH_EXCEEDED"


class UnknownModel(InvalidRequest):
    """The named model is not served here."""

    code = "UNKNOWN_MODEL"
    status = "NOT_FOUND"


class UnknownRequest(InvalidRequest):
    """The request asked about is not known here, or not any more."""

    code = "UNKNOWN_REQUEST"
    status = "NOT_FOUND"


class Unauthenticated(BatonError):
    """The caller shows no API key, or one that is not known; `field` names the metadata of the call."""

    code = "UNAUTHENTICATED"
    status = "UNAUTHENTICATED"


class Overloaded(BatonError):
    """A bounded queue is full, or a caller has used up what it may for now."""

    code = "OVERLOADED"
    status = "RESOURCE_EXHAUSTED"
    retryable = True


class Unavailable(BatonError):
    """No worker can serve this now."""

    code = "UNAVAILABLE"
    status = "UNAVAILABLE"
    retryable = True


class Draining(Unavailable):
    """The process is leaving: it takes no new work, or hands over what it has. Another one can go on."""

    code = "DRAINING"


class PeerLost(Unavailable):
    """The other end of a session is gone: reset, end of stream, or silence."""

    code = "PEER_LOST"


class KvTransferFailed(Unavailable):
    """The KV did not arrive intact in time."""

    code = "KV_TRANSFER_FAILED"


class DeadlineExceeded(BatonError):
    """The caller's deadline passed."""

    code = "DEADLINE_EXCEEDED"
    status = "DEADLINE_EXCEEDED"


class Cancelled(BatonError):
    """The caller gave up."""

    code = "CANCELLED"
    status = "CANCELLED"


class PoisonRequest(BatonError):
    """Workers died of this request again and again, at last when it had a step to itself."""

    code = "POISON_REQUEST"


class NonFiniteLogits(BatonError):
    """The model produced NaN or infinite logits for this request."""

    code = "NON_FINITE_LOGITS"


class IncompleteAnswer(BatonError):
    """An answer that was to be JSON ended before the JSON did; `field` names the option that ended it.

    text: what there is of it.
    """

    code = "INCOMPLETE_ANSWER"
    status = "OUT_OF_RANGE"

    def __init__(
        self, message: str, *, field: str = "", retry_after_s: float | None = None, text: str = ""
    ) -> None:
        super().__init__(message, field=field, retry_after_s=retry_after_s)
        self.text = text


class IncompatiblePeer(BatonError):
    """Two processes must not work together; `field` names what differs."""

    code = "INCOMPATIBLE_PEER"
    status = "FAILED_PRECONDITION"


class ModelError(BatonError):
    """A model folder cannot be used; the message names the file and the remedy."""

    code = "MODEL_ERROR"
    status = "FAILED_PRECONDITION"


class ConfigError(BatonError, ValueError):
    """A setting is unknown or has a bad value; `field` names the key."""

    code = "CONFIG_ERROR"
    status = "INVALID_ARGUMENT"


class InternalError(BatonError):
    """A defect of Baton's own."""

    code = "INTERNAL"


def _tree(cls: type[BatonError]) -> list[type[BatonError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in _tree(sub))]


BY_CODE: dict[str, type[BatonError]] = {cls.code: cls for cls in _tree(BatonError)}
