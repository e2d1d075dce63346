"""Credit is conserved, shared equally, reclaimed only when somebody lacks it, and dies with its session."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.errors import InvalidRequest
from prefill_worker.credits import CreditChange, CreditTable


def test_a_lone_session_is_granted_the_whole_budget() -> None:
    table = CreditTable(100)
    assert table.join(1) == [CreditChange(1, granted=100)]
    assert (table.num_free, table.num_spent) == (0, 0)


def test_a_second_session_gets_what_the_first_returns() -> None:
    table = CreditTable(100)
    table.join(1)
    assert table.join(2) == [CreditChange(1, reclaimed=50)]
    assert table.give_back(1, 50) == [CreditChange(2, granted=50)]


def test_spent_credit_comes_back_to_whoever_lacks_it() -> None:
    table = CreditTable(100)
    table.join(1)
    table.spend(1, 100)
    # Nothing unused to ask for.
    assert table.join(2) == []
    assert table.restore(1, 60) == [CreditChange(1, granted=10), CreditChange(2, granted=50)]
    assert table.restore(1, 40) == [CreditChange(1, granted=40)]


def test_a_session_asked_in_vain_is_asked_again_only_after_a_while() -> None:
    table = CreditTable(100)
    table.join(1)
    assert table.join(2) == [CreditChange(1, reclaimed=50)]
    # All of it is on its way as a command.
    assert table.give_back(1, 0) == []
    assert table.ask_again(1) == [CreditChange(1, reclaimed=50)]
    table.spend(1, 100)
    assert table.give_back(1, 0) == []
    assert table.ask_again(1) == []
    assert table.ask_again(2) == []


def test_a_partial_answer_is_used_at_once() -> None:
    table = CreditTable(100)
    table.join(1)
    table.join(2)
    assert table.give_back(1, 20) == [CreditChange(2, granted=20)]
    assert table.ask_again(1) == [CreditChange(1, reclaimed=30)]


def test_a_session_that_leaves_frees_what_it_had_spent_too() -> None:
    table = CreditTable(100)
    table.join(1)
    table.spend(1, 70)
    table.join(2)
    assert table.leave(1) == [CreditChange(2, granted=100)]
    assert table.num_spent == 0
    # Its prompts end later; nothing is counted twice.
    assert table.restore(1, 70) == []
    assert table.num_free == 0


@pytest.mark.parametrize("cost", [0, -1, 51])
def test_a_session_cannot_spend_what_it_does_not_hold(cost: int) -> None:
    table = CreditTable(100)
    table.join(1)
    table.spend(1, 50)
    with pytest.raises(InvalidRequest) as error:
        table.spend(1, cost)
    assert error.value.field == "cost_tokens"
    assert table.num_spent == 50


class Credit(RuleBasedStateMachine):
    """Sessions that know only what they are told, as routers do."""

    @initialize(budget=st.integers(1, 300))
    def start(self, budget: int) -> None:
        self.table = CreditTable(budget)
        self.held: dict[int, int] = {}
        self.prompts: list[tuple[int, int]] = []
        self.asked: dict[int, int] = {}
        self.next_id = 0

    def told(self, changes: list[CreditChange]) -> None:
        for change in changes:
            assert (change.granted > 0) != (change.reclaimed > 0)
            self.held[change.session_id] += change.granted
            if change.reclaimed:
                self.asked[change.session_id] = change.reclaimed

    @rule()
    def join(self) -> None:
        self.held[self.next_id] = 0
        self.next_id += 1
        self.told(self.table.join(self.next_id - 1))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[session]
        self.asked.pop(session, None)
        self.told(self.table.leave(session))

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def spend(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(s for s, held in self.held.items() if held)))
        cost = data.draw(st.integers(1, self.held[session]))
        self.held[session] -= cost
        self.prompts.append((session, cost))
        self.table.spend(session, cost)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        session, cost = self.prompts.pop(data.draw(st.integers(0, len(self.prompts) - 1)))
        self.told(self.table.restore(session, cost))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.asked)))
        returned = min(self.asked.pop(session), data.draw(st.integers(0, 300)), self.held[session])
        self.held[session] -= returned
        self.told(self.table.give_back(session, returned))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def heartbeat(self, data: st.DataObject) -> None:
        self.told(self.table.ask_again(data.draw(st.sampled_from(sorted(self.held)))))

    @invariant()
    def conserved(self) -> None:
        spent = sum(cost for session, cost in self.prompts if session in self.held)
        assert self.table.num_spent == spent
        assert all(held >= 0 for held in self.held.values())
        assert self.table.num_free >= 0
        assert self.table.num_free + sum(self.held.values()) + spent == self.table.budget

    @invariant()
    def nobody_lacks_what_is_free(self) -> None:
        if not self.held:
            return
        share = self.table.budget // len(self.held)
        for session, held in self.held.items():
            total = held + sum(cost for owner, cost in self.prompts if owner == session)
            assert total >= share or self.table.num_free == 0


Credit.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_credit_is_conserved = Credit.TestCase
