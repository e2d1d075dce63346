"""What the router knows of the workers' prefix caches, against an oracle that compares tokens."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from baton.errors import PeerLost
from baton.prefix_keys import PrefixKeys
from baton.v1 import common_pb2
from router.placing.prefix_map import PrefixMap
from router.placing.prompt_keys import PromptKeys

SIZE = 4
PROMPT = list(range(50, 71))

# A block by what it stands for: salt, and all tokens up to its end.
Block = tuple[bytes, tuple[int, ...]]


def to_compute(made: PrefixMap, prompt: PromptKeys) -> dict[int, int]:
    return made.leaving_last(made.match(prompt), prompt.num_tokens)


def keys_of(tokens: list[int], *, size: int = SIZE, salt: bytes = b"") -> list[bytes]:
    return PrefixKeys(salt, block_size=size).keys(tokens)


def changes(
    stored: Iterable[bytes] = (), removed: Iterable[bytes] = (), *, reset: bool = False
) -> common_pb2.CacheChanges:
    return common_pb2.CacheChanges(reset=reset, stored=b"".join(stored), removed=b"".join(removed))


def holding(*, size: int = SIZE, **tokens_of: list[int]) -> PrefixMap:
    """A map of workers 0, 1, ... that hold these tokens."""
    made = PrefixMap()
    for worker, tokens in enumerate(tokens_of.values()):
        made.apply(worker, changes(keys_of(tokens, size=size), reset=True), size, 100)
    return made


def test_each_worker_is_credited_with_what_it_holds_from_the_start() -> None:
    made = holding(most=PROMPT[:20], some=PROMPT[:10], others=[1, *PROMPT[1:]], none=[])
    assert to_compute(made, PromptKeys(PROMPT)) == {0: 20, 1: 8}


def test_a_hole_ends_what_counts() -> None:
    made = holding(first=PROMPT)
    made.apply(0, changes(removed=[keys_of(PROMPT)[2]]), SIZE, 100)
    assert to_compute(made, PromptKeys(PROMPT)) == {0: 8}
    made.apply(0, changes(removed=[keys_of(PROMPT)[0]]), SIZE, 100)
    assert to_compute(made, PromptKeys(PROMPT)) == {}


@pytest.mark.parametrize(
    ("num_tokens", "computed", "received"), [(3, {}, {}), (4, {}, {0: 4}), (5, {0: 4}, {0: 4})]
)
def test_the_last_token_counts_only_for_who_need_not_compute_it(
    num_tokens: int, computed: dict[int, int], received: dict[int, int]
) -> None:
    made, prompt = holding(first=PROMPT), PromptKeys(PROMPT[:num_tokens])
    assert to_compute(made, prompt) == computed
    assert made.match(prompt) == received


def test_no_key_is_computed_past_the_first_block_that_nobody_holds() -> None:
    made, prompt = holding(first=PROMPT[:8], second=PROMPT[:4]), PromptKeys(PROMPT)
    made.match(prompt)
    assert len(prompt.computed(SIZE)) == 3


def test_without_workers_no_key_is_computed() -> None:
    prompt = PromptKeys(PROMPT)
    assert PrefixMap().match(prompt) == {}
    assert prompt.computed(SIZE) == []


def test_a_list_in_parts_adds_up_and_a_new_list_replaces_it() -> None:
    made, keys = PrefixMap(), keys_of(PROMPT)
    made.apply(7, changes(keys[:2], reset=True), SIZE, 5)
    made.apply(7, changes(keys[2:]), SIZE, 5)
    assert (made.num_keys, made.match(PromptKeys(PROMPT))) == (5, {7: 20})
    made.apply(7, changes(keys[:1], reset=True), SIZE, 5)
    assert (made.num_keys, made.match(PromptKeys(PROMPT))) == (1, {7: 4})


def test_a_worker_that_is_gone_leaves_nothing() -> None:
    made = holding(first=PROMPT, second=PROMPT[:9])
    made.forget(0)
    made.forget(0)
    assert made.match(PromptKeys(PROMPT)) == {1: 8}
    made.forget(1)
    assert (made.num_keys, made._masks, made._worker_of, made._mask_of_size) == (0, {}, {}, {})


def test_many_workers_come_and_go_and_masks_stay_short() -> None:
    made = PrefixMap()
    for worker in range(500):
        made.apply(worker, changes(keys_of(PROMPT), reset=True), SIZE, 5)
        made.forget(worker - 3)
    assert made.match(PromptKeys(PROMPT)) == {497: 20, 498: 20, 499: 20}
    assert max(made._masks.values()).bit_length() <= 4


@pytest.mark.parametrize(
    "lie",
    [
        common_pb2.CacheChanges(stored=b"x" * 17),
        common_pb2.CacheChanges(removed=b"x" * 15),
        common_pb2.CacheChanges(stored=b"x" * 16, removed=b"y" * 16 + b"x" * 16),
        common_pb2.CacheChanges(stored=b"".join(bytes([n]) * 16 for n in range(6))),
        common_pb2.CacheChanges(stored=b"".join(bytes([n]) * 16 for n in range(11)), reset=True),
    ],
    ids=["half a key", "half a removed key", "stored and removed", "too many", "too long a list"],
)
def test_who_says_what_cannot_be_is_forgotten(lie: common_pb2.CacheChanges) -> None:
    made = PrefixMap()
    made.apply(0, changes(keys_of(PROMPT), reset=True), SIZE, 10)
    made.apply(1, changes(keys_of(PROMPT), reset=True), SIZE, 10)
    with pytest.raises(PeerLost, match="prefix cache"):
        made.apply(0, lie, SIZE, 10)
    assert made.match(PromptKeys(PROMPT)) == {1: 20}
    assert made.num_keys == 5


def test_as_many_keys_as_blocks_are_possible_and_the_same_ones_again_are_no_more() -> None:
    made, keys = PrefixMap(), keys_of(PROMPT)
    made.apply(0, changes(keys, reset=True), SIZE, 5)
    made.apply(0, changes(keys[:3]), SIZE, 5)
    made.apply(0, changes(keys_of([1] * 4), keys[4:]), SIZE, 5)
    made.apply(0, changes(removed=[b"never stored, 16"]), SIZE, 5)
    assert (made.num_keys, made.match(PromptKeys(PROMPT))) == (5, {0: 16})


def test_changes_to_a_list_that_was_never_told_are_refused() -> None:
    with pytest.raises(PeerLost, match="no complete list"):
        PrefixMap().apply(0, changes(keys_of(PROMPT)), SIZE, 100)


class Oracle:
    """Workers' blocks as tokens; a match compares them one after the other."""

    def __init__(self) -> None:
        self.held: dict[int, set[Block]] = {}

    def match(self, tokens: list[int], salt: bytes, sizes: dict[int, int]) -> dict[int, int]:
        found = {}
        for worker, blocks in self.held.items():
            count = 0
            while count + sizes[worker] <= len(tokens) and (
                (salt, tuple(tokens[: count + sizes[worker]])) in blocks
            ):
                count += sizes[worker]
            if count:
                found[worker] = count
        return found


def blocks_of(tokens: list[int], salt: bytes, size: int) -> list[Block]:
    return [(salt, tuple(tokens[:end])) for end in range(size, len(tokens) + 1, size)]


def key_of(block: Block, size: int) -> bytes:
    salt, tokens = block
    return keys_of(list(tokens), size=size, salt=salt)[-1]


@pytest.mark.parametrize("seed", range(4))
def test_the_map_equals_an_oracle_after_random_stores_evictions_and_resets(seed: int) -> None:
    rng = random.Random(seed)
    made, oracle = PrefixMap(), Oracle()
    sizes = {worker: rng.choice([2, 3]) for worker in range(6)}

    def sequence() -> tuple[list[int], bytes]:
        # Two tokens and two tenants, so that much is shared and salts keep it apart.
        return [rng.randrange(2) for _ in range(rng.randrange(13))], rng.choice([b"", b"other"])

    for _ in range(400):
        worker = rng.randrange(6)
        blocks, size = oracle.held.get(worker, set()), sizes[worker]
        is_reset = worker not in oracle.held or rng.random() < 0.1
        stored = set(blocks_of(*sequence(), size)) - (set() if is_reset else blocks)
        removed = {b for b in sorted(blocks) if rng.random() < 0.3} if not is_reset else set()
        if rng.random() < 0.05:
            oracle.held.pop(worker, None)
            made.forget(worker)
            continue
        stored -= removed
        oracle.held[worker] = (set() if is_reset else blocks - removed) | stored
        told = changes(
            [key_of(b, size) for b in sorted(stored)], [key_of(b, size) for b in removed], reset=is_reset
        )
        made.apply(worker, told, size, 1000)
        tokens, salt = sequence()
        prompt = PromptKeys(tokens, salt)
        assert made.match(prompt) == oracle.match(tokens, salt, sizes)
        assert to_compute(made, prompt) == oracle.match(tokens[:-1], salt, sizes)
        assert made.num_keys == sum(len(blocks) for blocks in oracle.held.values())
