"""Which write has which slot, and when a slot may be granted again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtransfer.slots import Sender, SlotTable

OLD, NEW = Sender("prefill-0", 1), Sender("prefill-0", 2)
OTHER = Sender("prefill-1", 1)


def test_a_write_gets_what_it_wants_may_have_and_is_free() -> None:
    table = SlotTable(20, max_per_write=16)
    first = table.grant("a", OLD, 1_000_000, 0.0)
    assert len(set(first)) == 16
    assert len(table.grant("b", OLD, 3, 0.0)) == 3
    assert len(table.grant("c", OLD, 3, 0.0)) == 1
    assert table.grant("d", OLD, 3, 0.0) == table.grant("e", OLD, 0, 0.0) == ()
    assert (table.num_free, table.num_held) == (0, 20)


def test_a_write_with_slots_gets_no_more() -> None:
    table = SlotTable(4, max_per_write=2)
    table.grant("a", OLD, 2, 0.0)
    with pytest.raises(ValueError, match="has its slots already"):
        table.grant("a", OLD, 2, 0.0)


def test_a_slot_is_the_writes_from_its_grant_to_its_end() -> None:
    table = SlotTable(4, max_per_write=2)
    slots = table.grant("a", OLD, 2, 0.0)
    others = set(range(4)) - set(slots)
    assert all(table.holds("a", slot) for slot in slots)
    assert not any(table.holds("a", slot) for slot in (*others, 4, 1 << 31))
    assert not table.holds("b", slots[0])
    table.end("a", 1.0, is_quiet=True)
    assert not table.holds("a", slots[0])
    table.end("a", 1.0, is_quiet=False)
    assert table.counts() == {"free": 4, "held": 0, "quarantined": 0, "retired": 0}


def test_slots_of_a_write_that_was_cut_off_wait_for_a_new_life_of_their_sender() -> None:
    table = SlotTable(4, max_per_write=2)
    table.grant("a", OLD, 2, 0.0)
    table.end("a", 1.0, is_quiet=False)
    table.met(OTHER)
    table.met(OLD)
    assert table.counts() == {"free": 2, "held": 0, "quarantined": 2, "retired": 0}
    table.met(NEW)
    assert table.counts() == {"free": 4, "held": 0, "quarantined": 0, "retired": 0}


def test_slots_that_nobody_vouches_for_are_given_up_after_a_while_and_free_if_word_comes() -> None:
    table = SlotTable(4, max_per_write=2, retire_s=60.0)
    table.grant("a", OLD, 2, 0.0)
    table.end("a", 10.0, is_quiet=False)
    assert table.retire(69.9) == 0
    assert table.retire(70.0) == 2
    assert table.counts() == {"free": 2, "held": 0, "quarantined": 0, "retired": 2}
    table.met(NEW)
    assert table.counts() == {"free": 4, "held": 0, "quarantined": 0, "retired": 0}


def test_a_living_sender_vouches_for_writes_that_were_cut_off() -> None:
    table = SlotTable(8, max_per_write=2, retire_s=60.0)
    for write, sender in (("a", OLD), ("b", OLD), ("c", OTHER)):
        table.grant(write, sender, 2, 0.0)
        table.end(write, 1.0, is_quiet=False)
    table.vouched(OLD, lambda write: write == "b")
    assert table.counts() == {"free": 4, "held": 0, "quarantined": 4, "retired": 0}
    table.vouched(OLD, lambda write: False)
    assert table.counts() == {"free": 6, "held": 0, "quarantined": 2, "retired": 0}


def test_a_grant_gives_up_what_is_too_old() -> None:
    table = SlotTable(4, max_per_write=2, retire_s=60.0)
    table.grant("a", OLD, 2, 0.0)
    table.end("a", 10.0, is_quiet=False)
    table.grant("b", OTHER, 1, 70.0)
    assert table.counts() == {"free": 1, "held": 1, "quarantined": 0, "retired": 2}


WAITING = ("quarantined", "retired")


class SlotMachine(RuleBasedStateMachine):
    """Random calls in random order, against books kept here, slot by slot."""

    @initialize(num_slots=st.integers(0, 7), max_per_write=st.integers(1, 4))
    def start(self, num_slots: int, max_per_write: int) -> None:
        self.table = SlotTable(num_slots, max_per_write=max_per_write, retire_s=10.0)
        self.max_per_write = max_per_write
        self.now = 0.0
        self.states: dict[int, Any] = dict.fromkeys(range(num_slots), "free")
        self.senders = {name: Sender(name, 0) for name in ("p0", "p1")}
        self.writes: dict[int, tuple[Sender, tuple[int, ...]]] = {}
        self.num_writes = 0

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=st.sampled_from(["p0", "p1"]), num_wanted=st.integers(0, 9))
    def grant(self, name: str, num_wanted: int) -> None:
        sender = self.senders[name]
        self._retire()
        self._free_of_older(sender)
        free = [slot for slot, state in self.states.items() if state == "free"]
        slots = self.table.grant(self.num_writes, sender, num_wanted, self.now)
        assert len(slots) == min(num_wanted, self.max_per_write, len(free))
        assert set(slots) <= set(free)
        self.states.update(dict.fromkeys(slots, "held"))
        self.writes[self.num_writes] = (sender, slots)
        self.num_writes += 1

    @rule(which=st.integers(0, 20), is_quiet=st.booleans())
    def end(self, which: int, is_quiet: bool) -> None:
        self.table.end(which, self.now, is_quiet=is_quiet)
        sender, slots = self.writes.pop(which, (None, ()))
        self.states.update(dict.fromkeys(slots, "free" if is_quiet else ("quarantined", sender, self.now)))

    @rule(name=st.sampled_from(["p0", "p1"]))
    def restart(self, name: str) -> None:
        self.senders[name] = Sender(name, self.senders[name].incarnation + 1)
        self.table.met(self.senders[name])
        self._free_of_older(self.senders[name])

    @rule()
    def retire(self) -> None:
        assert self.table.retire(self.now) == self._retire()

    def _retire(self) -> int:
        old = [
            s for s, state in self.states.items() if state[0] == "quarantined" and self.now - state[2] >= 10
        ]
        for slot in old:
            self.states[slot] = ("retired", *self.states[slot][1:])
        return len(old)

    def _free_of_older(self, sender: Sender) -> None:
        for slot, state in self.states.items():
            if state[0] in WAITING and state[1].name == sender.name and state[1] != sender:
                self.states[slot] = "free"

    @invariant()
    def every_slot_is_in_one_state(self) -> None:
        states = list(self.states.values())
        assert self.table.counts() == {
            "free": states.count("free"),
            "held": states.count("held"),
            "quarantined": sum(state[0] == "quarantined" for state in states),
            "retired": sum(state[0] == "retired" for state in states),
        }
        for write, (_, slots) in self.writes.items():
            assert [s for s in range(9) if self.table.holds(write, s)] == sorted(slots)


SlotMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestSlotMachine = SlotMachine.TestCase
