"""Tells in the log of requests that failed because of the model, which nobody but an operator can mend.

Owns the words. It gets the request's id and never sees its prompt.
"""

from __future__ import annotations

from baton.errors import BatonError, NonFiniteLogits
from baton.logs import get_logger

log = get_logger(__name__)


def tell_nonfinite(error: BatonError, request_id: str) -> None:
    """One warning if the model's values were not finite; its reason names the layer where that is known."""
    if isinstance(error, NonFiniteLogits):
        log.warning("logits are not finite", request_id=request_id, reason=error.message)
