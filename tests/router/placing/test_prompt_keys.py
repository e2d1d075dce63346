"""Keys of a prompt, as workers with blocks of several sizes know them."""

from __future__ import annotations

import pytest

from baton.prefix_keys import PrefixKeys
from router.placing.prompt_keys import PromptKeys

PROMPT = list(range(100, 123))


@pytest.mark.parametrize("block_size", [4, 6])
def test_keys_are_those_of_the_workers(block_size: int) -> None:
    keys = PromptKeys(PROMPT, b"tenant")
    extended = [keys.extend(block_size) for _ in range(len(PROMPT) // block_size)]
    assert extended == PrefixKeys(b"tenant", block_size=block_size).keys(PROMPT)
    assert keys.computed(block_size) == extended


def test_sizes_do_not_mix() -> None:
    keys = PromptKeys(PROMPT)
    keys.extend(4)
    keys.extend(6)
    assert (len(keys.computed(4)), len(keys.computed(6)), keys.computed(8)) == (1, 1, [])
    assert keys.computed(4) != keys.computed(6)


def test_a_block_that_is_not_full_has_no_key() -> None:
    keys = PromptKeys(PROMPT[:7])
    keys.extend(4)
    with pytest.raises(ValueError, match="not full"):
        keys.extend(4)
    assert len(keys.computed(4)) == 1


def test_an_answer_that_grows_has_more_keys() -> None:
    tokens = PROMPT[:7]
    keys = PromptKeys(tokens)
    keys.extend(4)
    tokens += PROMPT[7:12]
    assert keys.num_tokens == 12
    assert [keys.extend(4), keys.extend(4)] == PrefixKeys(b"", block_size=4).keys(PROMPT)[1:3]
