"""How many blocks an attempt reserves at a decode worker, and for how many tokens.

Owns the arithmetic between a request and the lease table. Knows no session.
"""

from __future__ import annotations

from baton.limits import Limits, blocks_needed
from decode_worker.attempt import Attempt
from engine.engine import Engine
from kvtransfer.lease_table import Lease, LeaseTable, Refusal


def reserve_blocks(
    attempt: Attempt,
    engine: Engine,
    leases: LeaseTable[Attempt],
    limits: Limits,
    now: float,
) -> Lease[Attempt] | Refusal:
    """Reserves blocks for the tokens there are and one more; what comes then is growth."""
    request, pool = attempt.request, engine.pool
    in_all = limits.kv_tokens(request.num_prompt_tokens, request.params.max_tokens)
    # Whoever computes leaves the last token, whose logits are wanted.
    num_tokens = request.num_tokens - (1 if attempt.is_computing_prompt else 0)
    held = engine.scheduler.tables.lookup(request, num_tokens)
    lease = leases.reserve(
        request.attempt_id,
        attempt,
        num_blocks=blocks_needed(min(request.num_tokens + 1, in_all), pool.block_size),
        num_blocks_in_all=blocks_needed(in_all, pool.block_size),
        num_tokens=request.num_tokens,
        held_block_ids=held,
        watermark_blocks=engine.scheduler.num_growth_blocks,
        now=now,
    )
    if isinstance(lease, Refusal):
        pool.release(held)
    return lease
