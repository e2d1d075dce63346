"""Which requests an engine can run at all.

Owns the rule; that a request must wait is another matter, and the scheduler's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.errors import InvalidRequest
from baton.limits import Limits, blocks_needed

if TYPE_CHECKING:
    from engine.block_pool import BlockPool
    from engine.request import Request


def check_fits(request: Request, limits: Limits, pool: BlockPool) -> None:
    """Raises InvalidRequest, naming the field, if the request can never run with this pool."""
    if not 0 < request.num_tokens < limits.max_model_len:
        raise InvalidRequest(
            f"the request has {request.num_tokens} tokens; this model takes 1 to "
            f"{limits.max_model_len - 1} and needs room for one more",
            field="prompt",
        )
    needed = blocks_needed(_most_tokens(request, limits), pool.block_size)
    if needed > pool.num_blocks:
        # Alone in the worker it would still run out of blocks.
        raise InvalidRequest(
            f"the request needs {needed} blocks of {pool.block_size} tokens; this worker has "
            f"{pool.num_blocks} in all: shorten the prompt, lower max_tokens or raise kv_cache_bytes",
            field="prompt" if request.prefill_only else "max_tokens",
        )


def _most_tokens(request: Request, limits: Limits) -> int:
    if request.prefill_only:
        return request.num_tokens
    most = limits.kv_tokens(request.num_prompt_tokens, request.params.max_tokens)
    return min(most, limits.max_model_len - 1)
