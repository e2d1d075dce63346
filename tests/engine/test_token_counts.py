"""Token counts against counting afresh."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine.token_counts import TokenCounts

TOKENS = st.lists(st.integers(0, 300), max_size=200)


def counted(counts: TokenCounts, token_ids: list[int]) -> dict[int, int]:
    ids, numbers = counts.catch_up(token_ids)
    assert len(set(ids.tolist())) == len(ids) == len(numbers)
    return dict(zip(ids.tolist(), numbers.tolist(), strict=True))


@given(TOKENS.filter(bool), TOKENS, st.booleans(), st.integers(0, 200))
def test_catching_up_in_any_steps_counts_the_answer(
    prompt: list[int], answer: list[int], with_prompt: bool, first: int
) -> None:
    counts = TokenCounts(len(prompt), with_prompt=with_prompt)
    expected = Counter(answer)
    listed = set(answer) | (set(prompt) if with_prompt else set())

    # A resumed request begins somewhere in its answer; then comes one token at a time.
    counts.catch_up([*prompt, *answer[:first]])
    for end in range(first, len(answer)):
        counts.catch_up([*prompt, *answer[:end]])

    assert counted(counts, [*prompt, *answer]) == {token_id: expected[token_id] for token_id in listed}


def test_ids_come_in_order_of_appearance() -> None:
    counts = TokenCounts(3, with_prompt=True)

    ids, numbers = counts.catch_up([9, 4, 9, 7, 4, 4])

    assert ids.tolist() == [9, 4, 7]
    assert numbers.tolist() == [0, 2, 1]
