"""Credit: how much prompt each router may have in flight at this worker, in tokens.

A synchronous core. Conservation: free + held by routers + spent on prompts that
are not computed yet == budget, always. Shares are equal; credit above a share
is asked back only when another session lacks it, and only what is unused is
ever returned. Credit dies with its session.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import InvalidRequest


@dataclass(slots=True)
class _Account:
    held: int = 0
    spent: int = 0
    asked_back: int = 0

    @property
    def total(self) -> int:
        return self.held + self.spent


@dataclass(frozen=True, slots=True)
class CreditChange:
    """What to tell one session: credit granted to it, or wanted back from it, in tokens."""

    session_id: int
    granted: int = 0
    reclaimed: int = 0


class CreditTable:
    """Credit of all sessions of one prefill worker.

    budget: most tokens of prompt that may be granted, over all sessions.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._accounts: dict[int, _Account] = {}

    @property
    def budget(self) -> int:
        """The budget, in tokens."""
        return self._budget

    @property
    def share(self) -> int:
        """Most credit one session can come to, in tokens; a prompt costs no more than that."""
        return self._budget // max(1, len(self._accounts))

    @property
    def num_spent(self) -> int:
        """Credit spent on prompts in flight, in tokens."""
        return sum(account.spent for account in self._accounts.values())

    @property
    def num_free(self) -> int:
        """Credit nobody holds, in tokens."""
        return self._budget - sum(account.total for account in self._accounts.values())

    def join(self, session_id: int) -> list[CreditChange]:
        """Opens an account; returns what to tell the sessions."""
        self._accounts[session_id] = _Account()
        return self._settle()

    def leave(self, session_id: int) -> list[CreditChange]:
        """Closes an account with all its credit."""
        del self._accounts[session_id]
        return self._settle()

    def spend(self, session_id: int, cost: int) -> None:
        """A command arrived; raises InvalidRequest if the session does not hold that much."""
        account = self._accounts[session_id]
        if not 0 < cost <= account.held:
            raise InvalidRequest(
                f"the command costs {cost} tokens of credit, the session holds {account.held}",
                field="cost_tokens",
            )
        account.held -= cost
        account.spent += cost

    def restore(self, session_id: int, cost: int) -> list[CreditChange]:
        """A prompt is computed or gone: its credit is free again. Nothing happens if the session left."""
        account = self._accounts.get(session_id)
        if account is None:
            return []
        account.spent -= cost
        return self._settle()

    def give_back(self, session_id: int, tokens: int) -> list[CreditChange]:
        """The answer to a reclaim; more than is held counts as all of it.

        A session that returned less than was asked for has commands on the way; it
        is not asked again before ask_again(), or the two would only exchange zeros.
        """
        account = self._accounts[session_id]
        account.held -= min(tokens, account.held)
        account.asked_back = max(0, account.asked_back - tokens)
        return self._settle()

    def ask_again(self, session_id: int) -> list[CreditChange]:
        """Some time has passed: what is still wanted from the session may be asked for once more."""
        account = self._accounts[session_id]
        if account.asked_back == 0:
            return []
        account.asked_back = 0
        return self._settle()

    def _settle(self) -> list[CreditChange]:
        """Grants free credit up to each share and asks back what others lack."""
        share = self.share
        changes = []
        for session_id, account in self._accounts.items():
            granted = min(share - account.total, self.num_free)
            if granted > 0:
                account.held += granted
                changes.append(CreditChange(session_id, granted=granted))
        lacking = sum(max(0, share - account.total) for account in self._accounts.values())
        return changes + self._reclaim(share, lacking)

    def _reclaim(self, share: int, lacking: int) -> list[CreditChange]:
        changes = []
        for session_id, account in self._accounts.items():
            wanted = min(account.total - share, account.held, lacking)
            if wanted > 0 and account.asked_back == 0:
                account.asked_back = wanted
                lacking -= wanted
                changes.append(CreditChange(session_id, reclaimed=wanted))
        return changes
