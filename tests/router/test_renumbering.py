from __future__ import annotations

from router.renumbering import Renumbering


def test_names_are_numbered_in_order_of_appearance() -> None:
    numbers = Renumbering()
    assert [numbers.number(name) for name in (b"x", b"y", b"x", b"z", b"y")] == [1, 2, 1, 3, 2]


def test_successive_numbers_are_told_as_runs() -> None:
    numbers = Renumbering()
    assert numbers.runs([b"a", b"b", b"c"]) == [[1, 3]]
    # A prompt that shares two blocks and has two of its own; then one that begins elsewhere.
    assert numbers.runs([b"a", b"b", b"d", b"e"]) == [[1, 2], [4, 2]]
    assert numbers.runs([b"e", b"a", b"b"]) == [[5, 1], [1, 2]]
    assert numbers.runs([]) == []


def test_it_never_knows_more_than_its_bound_and_keeps_what_is_used() -> None:
    numbers = Renumbering(max_known=10)
    assert numbers.number(b"kept") == 1
    for index in range(1000):
        numbers.number(b"%d" % index)
        assert len(numbers) <= 10
        if index % 4 == 0:
            assert numbers.number(b"kept") == 1


def test_what_was_forgotten_gets_a_new_number() -> None:
    numbers = Renumbering(max_known=4)
    assert numbers.number(b"gone") == 1
    assert [numbers.number(b"%d" % index) for index in range(8)] == list(range(2, 10))
    assert numbers.number(b"gone") == 10
