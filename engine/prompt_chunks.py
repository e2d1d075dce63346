"""How the prompts of one step share its tokens.

Owns the rule: the shortest remainder first, and for the oldest prompt a share that shorter ones
cannot take. The scheduler says which prompts there are and how many tokens the step has for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.batch_builder import Chunk

if TYPE_CHECKING:
    from engine.request import Request


def share_out(budget: int, prompts: Sequence[Request], *, chunk_tokens: int) -> list[Chunk]:
    """Chunks of the prompts, at most budget tokens in all and chunk_tokens of each.

    prompts: oldest first.
    """
    if not prompts or budget < 1:
        return []
    oldest = prompts[0]
    # The oldest prompt's share is set aside first, whatever shorter ones come.
    promised = min(oldest.num_pending_tokens, chunk_tokens, max(1, budget // 2))
    left = budget - promised
    chunks = []
    for request in sorted(prompts, key=lambda r: r.num_pending_tokens):
        own = promised if request is oldest else 0
        num_tokens = min(request.num_pending_tokens, chunk_tokens, left + own)
        if num_tokens > 0:
            chunks.append(Chunk.of(request, num_tokens))
            left -= num_tokens - own
    return chunks
