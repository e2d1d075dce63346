"""When things happened to one request, and the Timings message made of it."""

from __future__ import annotations

import asyncio

from baton.v1 import inference_service_pb2, prefill_service_pb2


class Timeline:
    """Stamps of one request in loop seconds.

    A later attempt overwrites an earlier one's, except for the queue's share of a TTFT that is over.
    """

    def __init__(self, arrived_at: float, bucket: str) -> None:
        self.num_attempts = 1
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self._arrived_at = arrived_at
        self._timings = inference_service_pb2.Timings(bucket=bucket)
        self._dispatched_at: float | None = None
        self._first_token_at: float | None = None
        self._last_token_at: float | None = None
        self._num_tokens = 0

    @property
    def was_dispatched(self) -> bool:
        """Whether an attempt ever left the queue."""
        return self._dispatched_at is not None

    def dispatched(self, prefill_worker: str, decode_worker: str) -> None:
        """An attempt got its workers."""
        self._dispatched_at = asyncio.get_running_loop().time()
        self._timings.prefill_worker = prefill_worker
        self._timings.decode_worker = decode_worker
        if self._first_token_at is None:
            self._timings.queue_ms = 1000 * (self._dispatched_at - self._arrived_at)

    def reserved(self) -> None:
        """The decode worker granted a lease."""
        assert self._dispatched_at is not None
        self._timings.reserve_ms = 1000 * (asyncio.get_running_loop().time() - self._dispatched_at)

    def prefill_ended(self, event: prefill_service_pb2.PrefillEnded) -> None:
        """The prefill worker reported its part."""
        self.num_cached_tokens = event.num_cached_tokens
        self._timings.prefill_ms = event.prefill_ms
        self._timings.transfer_ms = event.transfer_ms
        self._timings.transfer_bytes = event.transfer_bytes
        self._timings.transfer_tail_ms = event.transfer_tail_ms
        self._timings.transfer_times.CopyFrom(event.transfer_times)
        self._timings.transfer_hidden_share = event.transfer_hidden_share
        if event.HasField("finished"):
            self._timings.decode_worker = ""

    def tokens_arrived(self, count: int) -> None:
        """New tokens reached the router."""
        self._last_token_at = asyncio.get_running_loop().time()
        self._first_token_at = self._first_token_at or self._last_token_at
        self._num_tokens += count

    def timings(self) -> inference_service_pb2.Timings:
        """The summary, up to now."""
        if self._first_token_at is not None and self._last_token_at is not None:
            self._timings.ttft_ms = 1000 * (self._first_token_at - self._arrived_at)
            self._timings.total_ms = 1000 * (self._last_token_at - self._arrived_at)
            if self._num_tokens > 1:
                gap_s = (self._last_token_at - self._first_token_at) / (self._num_tokens - 1)
                self._timings.itl_ms = 1000 * gap_s
        self._timings.num_attempts = self.num_attempts
        self._timings.num_preemptions = self.num_preemptions
        return self._timings
