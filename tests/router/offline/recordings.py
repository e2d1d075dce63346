"""Small recordings, made up so that what must come of them can be worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from router.offline.recording import RecordedRequest, RecordedWorker, Recording

# prefill: 10 ms a prompt, 1 ms a token; transfer: 5 ms; step: 20 ms, 2 ms a request, 0.5 ms a prompt token.
COSTS = {
    ("prefill", ""): (10.0, 1.0, 0.0),
    ("transfer", ""): (5.0, 0.0),
    ("step", ""): (20.0, 2.0, 0.0, 0.5),
}
SETTINGS = {
    "bucket_edges": [128, 256, 512],
    "max_wait_s": 5.0,
    "max_queue": 256,
    "placement": "auto",
    "local_max_tokens": 256,
    "itl_objective_ms": 150.0,
}


def prefill(name: str = "prefill-0", **changed: int) -> RecordedWorker:
    sizes = {"num_blocks": 1000, "block_size": 16, "chunk_tokens": 128, "max_batch_tokens": 256}
    return RecordedWorker(name=name, role="prefill", **sizes | changed)


def decode(name: str = "decode-0", **changed: int) -> RecordedWorker:
    sizes = {"num_blocks": 1000, "block_size": 16, "chunk_tokens": 128, "max_batch_tokens": 256}
    seats = {"mixed_tokens": 64, "max_running": 64}
    return RecordedWorker(name=name, role="decode", **sizes | seats | changed)


def request(
    number: int,
    arrived_at: float,
    num_prompt_tokens: int,
    num_output_tokens: int = 1,
    *,
    blocks: Sequence[int] = (),
    objective_ms: float = 1000.0,
) -> RecordedRequest:
    return RecordedRequest(
        number=number,
        arrived_at=arrived_at,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        max_tokens=max(16, num_output_tokens),
        ttft_objective_ms=objective_ms,
        prefix={16: tuple(blocks)},
    )


def recording(
    workers: Sequence[RecordedWorker],
    requests: Sequence[RecordedRequest],
    *,
    costs: Mapping[tuple[str, str], tuple[float, ...]] = COSTS,
    **settings: Any,
) -> Recording:
    """Nothing in it was measured."""
    return Recording(
        settings=SETTINGS | settings,
        workers=tuple(workers),
        requests=tuple(requests),
        measured=(),
        costs=costs,
        num_left_out=0,
    )
