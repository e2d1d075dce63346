"""Whether anybody is large enough for a request: here, or gone so shortly that it is worth waiting for.

Knows how much workers hold when they are empty, not what they have room for now.
"""

from __future__ import annotations

import asyncio
import itertools

from baton.errors import Unavailable
from baton.v1 import common_pb2
from router.assignment import Wanted
from router.decode_link import DecodeLink
from router.fleet import Fleet

RETRY_WITHOUT_WORKERS_S = 5.0


class Away(Exception):
    """Nobody who is here can ever hold the attempt, but who could has only just gone.

    wait_s: how long it is worth waiting for them to be back, in seconds.
    """

    def __init__(self, wait_s: float) -> None:
        super().__init__(wait_s)
        self.wait_s = wait_s


class Fit:
    """What the workers of a fleet can hold.

    grace_s: how long one that has gone is waited for, in seconds; as long as for any where nobody is left.
    """

    def __init__(self, fleet: Fleet, grace_s: float) -> None:
        self._fleet = fleet
        self._grace_s = grace_s

    def may_hold(self, role: common_pb2.Role.ValueType, num_tokens: int) -> bool:
        """Whether a worker of the role can hold so many tokens, or may be back that could.

        Also true where there is none of the role: nobody knows how large the next one is.
        """
        is_decode = role == common_pb2.ROLE_DECODE
        links = self._fleet.decode_links() if is_decode else self._fleet.prefill_links()
        is_here = not links or any(link.can_ever_take(num_tokens) for link in links)
        return is_here or self._away_s(role, num_tokens) > 0

    def decode_links(self, kv_tokens: int) -> list[DecodeLink]:
        """Decode workers that hold so many tokens when they are empty; the others refuse such a request."""
        return [link for link in self._fleet.decode_links() if link.can_ever_take(kv_tokens)]

    def objection(self, wanted: Wanted) -> Unavailable | Away | None:
        """Why an attempt need not wait for a place with those who are here; None if it may get one."""
        fleet, kv_tokens, num_tokens = self._fleet, wanted.kv_tokens, wanted.num_tokens
        prefills, decodes = fleet.prefill_links(), fleet.decode_links()
        # Asked again and again while nothing fits: in the usual case it looks at one of each.
        large = next((decode for decode in decodes if decode.can_ever_take(kv_tokens)), None)
        decode_side, prefill_side = (common_pb2.ROLE_DECODE, kv_tokens), (common_pb2.ROLE_PREFILL, num_tokens)
        if large is None:
            return self._too_large("decode worker", decode_side) if decodes else None
        if not fleet.needs_prefill or not prefills:
            return None
        able = (prefill for prefill in prefills if prefill.can_ever_take(num_tokens))
        first = next(able, None)
        if first is None:
            return None if wanted.may_be_local else self._too_large("prefill worker", prefill_side)
        if any(
            prefill.can_reach(decode.incarnation) or prefill.is_trying(decode.incarnation)
            for prefill in itertools.chain([first], able)
            for decode in decodes
            if decode is large or decode.can_ever_take(kv_tokens)
        ):
            return None
        # Where nobody reaches anybody, that is told; here those who could hold it do not.
        return self._too_large("pair of workers", decode_side, prefill_side) if fleet.is_complete else None

    def _too_large(self, who: str, *sides: tuple[common_pb2.Role.ValueType, int]) -> Unavailable | Away:
        away_s = max(self._away_s(*side) for side in sides)
        if away_s > 0:
            return Away(away_s)
        return Unavailable(
            f"no connected {who} holds {sides[0][1]} tokens of KV", retry_after_s=RETRY_WITHOUT_WORKERS_S
        )

    def _away_s(self, role: common_pb2.Role.ValueType, num_tokens: int) -> float:
        """How much longer to wait for one that held so many tokens; 0 if none did, or all went long ago."""
        went_at = self._fleet.went_at(role, num_tokens)
        if went_at is None:
            return 0.0
        return max(0.0, went_at + self._grace_s - asyncio.get_running_loop().time())
