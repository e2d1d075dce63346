"""A request that was placed twice, as its router would tell of it."""

from __future__ import annotations

from baton.v1 import common_pb2, route_explain_pb2


def explained() -> route_explain_pb2.RouteExplain:
    """Its prefill worker was lost at 20 ms; the second attempt took 100 ms to the first token, 170 in all."""
    return route_explain_pb2.RouteExplain(
        request_id="req-7",
        router="router-0",
        tenant="search",
        priority=common_pb2.PRIORITY_HIGH,
        bucket="256-511",
        num_prompt_tokens=400,
        num_uncached_tokens=336,
        expected_output_tokens=96,
        ttft_objective_ms=90.0,
        first_token_at_ms=100.0,
        ended_at_ms=170.0,
        outcome="OK",
        regret_ms=12.5,
        reported_at_ms=500.0,
        attempts=[lost_attempt(), good_attempt()],
    )


def lost_attempt() -> route_explain_pb2.AttemptExplain:
    return route_explain_pb2.AttemptExplain(
        number=1,
        queued_at_ms=0.0,
        placed_at_ms=5.0,
        reserved_at_ms=10.0,
        ended_at_ms=20.0,
        outcome="UNAVAILABLE",
        reason="[prefill-1] is lost",
    )


def good_attempt() -> route_explain_pb2.AttemptExplain:
    return route_explain_pb2.AttemptExplain(
        number=2,
        queued_at_ms=20.0,
        placed_at_ms=30.0,
        reserved_at_ms=40.0,
        first_token_at_ms=100.0,
        committed_at_ms=120.0,
        decoding_at_ms=140.0,
        ended_at_ms=170.0,
        outcome="OK",
        prefill=common_pb2.PrefillTimes(
            wait_ms=20.0,
            compute_ms=35.0,
            total_ms=55.0,
            num_steps=3,
            num_computed_tokens=336,
            num_cached_tokens=64,
        ),
        transfer_ms=50.0,
        transfer_tail_ms=20.0,
        transfer_bytes=5_000_000,
        transfer_hidden_share=0.6,
        num_candidates=5,
        candidates=[
            route_explain_pb2.Candidate(
                prefill_worker="prefill-0",
                decode_worker="decode-0",
                num_cached_tokens=64,
                num_held_tokens=32,
                wait_ms=1.0,
                prefill_ms=50.0,
                transfer_ms=9.0,
                itl_ms=12.0,
                score_ms=60.0,
                chosen=True,
            ),
            route_explain_pb2.Candidate(
                prefill_worker="decode-0", decode_worker="decode-0", prefill_ms=70.0, score_ms=1070.0
            ),
            route_explain_pb2.Candidate(
                prefill_worker="prefill-1", decode_worker="decode-0", excluded="failed this request before"
            ),
        ],
    )
