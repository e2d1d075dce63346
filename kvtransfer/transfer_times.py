"""Where the time of a transfer went: filled by the sender, reported by whoever counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TransferTimes:
    """Where the time of a transfer went, in seconds. The parts overlap: their sum may exceed the whole.

    open_s: until the receiver had admitted the write.
    wait_s: waiting for room at the receiver.
    prepare_s: reading the cache and computing digests.
    wire_s: handing frames to the transport.
    verify_s, convert_s: verifying, and converting and storing, at the receiver.
    commit_s: from the commit to its answer.
    """

    open_s: float = 0.0
    wait_s: float = 0.0
    prepare_s: float = 0.0
    wire_s: float = 0.0
    verify_s: float = 0.0
    convert_s: float = 0.0
    commit_s: float = 0.0
