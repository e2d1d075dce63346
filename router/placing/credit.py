"""What a prompt costs of the credit that a prefill worker has granted, and what is left to shorter ones.

Pure arithmetic, in tokens. seniority: of the prompt's length bucket: 0 the shortest, 1 the longest.
"""

from __future__ import annotations

# What the longest length bucket leaves to shorter ones; others less, in proportion.
KEPT_SHARE = 0.25


def kept_credit(share: int, seniority: float) -> int:
    """Credit that shorter prompts find however many of this length there are: none may wait behind those.

    share: all that the session can come to.
    """
    return int(seniority * KEPT_SHARE * share)


def credit_cost(num_tokens: int, share: int, seniority: float) -> int:
    """What a prompt of num_tokens to compute costs: those, or all that its length may spend, if less."""
    return min(max(1, num_tokens), share - kept_credit(share, seniority))
