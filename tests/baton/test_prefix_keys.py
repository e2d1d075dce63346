"""Prefix keys: fixed bytes, hashed once, and nobody else's."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.prefix_keys import KEY_VERSION, ROOT_KEY, PrefixKeys, rope_salt, tenant_salt

TOKEN_IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
# Computed once, by the first rule below; they may change only together with KEY_VERSION.
VECTORS = [
    (b"", 2, [5, 6, 7, 8, 9], ["d3ce4c1c0e3225414945f1437c41a442", "ced6ba141cb0f7d8564963e202be3f6a"]),
    (
        b"salt",
        3,
        [1, 2**31, 2**32 - 1, 7, 8, 9],
        ["b5710053e316db9d6476d7b3383dbe9f", "68168449858051c285838005dff46b52"],
    ),
]


def by_hand(salt: bytes, block_size: int, token_ids: list[int]) -> list[bytes]:
    """The rule, without struct and without a chain object: bytes of integers, fed piece by piece."""
    keys = [bytes(16)]
    for start in range(0, len(token_ids) // block_size * block_size, block_size):
        digest = hashlib.blake2b(digest_size=16, key=salt)
        digest.update(keys[-1])
        for token_id in token_ids[start : start + block_size]:
            digest.update(token_id.to_bytes(4, "little"))
        keys.append(digest.digest())
    return keys[1:]


@pytest.mark.parametrize(("salt", "block_size", "token_ids", "expected"), VECTORS)
def test_the_bytes_are_fixed(salt: bytes, block_size: int, token_ids: list[int], expected: list[str]) -> None:
    assert KEY_VERSION == 1
    assert [key.hex() for key in by_hand(salt, block_size, token_ids)] == expected
    assert [key.hex() for key in PrefixKeys(salt, block_size=block_size).keys(token_ids)] == expected


def test_another_process_finds_the_same_bytes() -> None:
    salt, block_size, token_ids, expected = VECTORS[1]
    code = (
        "from baton.prefix_keys import PrefixKeys;"
        f"print(*[k.hex() for k in PrefixKeys({salt!r}, block_size={block_size}).keys({token_ids})])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == expected


@given(
    token_ids=TOKEN_IDS,
    salt=st.binary(max_size=64),
    block_size=st.integers(1, 9),
    cuts=st.lists(st.integers(0, 40)),
)
def test_growing_step_by_step_is_the_same_as_at_once(
    token_ids: list[int], salt: bytes, block_size: int, cuts: list[int]
) -> None:
    growing = PrefixKeys(salt, block_size=block_size)
    for cut in sorted(cuts):
        assert growing.keys(token_ids[:cut]) == by_hand(salt, block_size, token_ids[:cut])
    assert growing.keys(token_ids) == by_hand(salt, block_size, token_ids)
    assert growing.keys(token_ids[: len(token_ids) // 2]) == by_hand(
        salt, block_size, token_ids[: len(token_ids) // 2]
    )


def test_a_block_is_hashed_once() -> None:
    keys = PrefixKeys(b"", block_size=2)
    keys.keys([1, 2, 3, 4])
    # What was hashed is not looked at again: only its place counts.
    assert keys.keys([0, 0, 0, 0, 5, 6]) == by_hand(b"", 2, [1, 2, 3, 4, 5, 6])


@given(token_ids=st.lists(st.integers(0, 99), min_size=8, max_size=8), at=st.integers(0, 7))
def test_a_changed_token_changes_its_key_and_all_after_it(token_ids: list[int], at: int) -> None:
    changed = [*token_ids[:at], token_ids[at] + 1, *token_ids[at + 1 :]]
    before = PrefixKeys(b"s", block_size=2).keys(token_ids)
    after = PrefixKeys(b"s", block_size=2).keys(changed)
    assert [a == b for a, b in zip(before, after, strict=True)] == [i < at // 2 for i in range(4)]


def test_salts_and_block_sizes_share_no_key() -> None:
    token_ids = list(range(64))
    found = [
        key
        for salt in (b"", b"\0", b"a", tenant_salt("a"), tenant_salt("b"))
        for block_size in (1, 2, 4, 8, 16)
        for key in PrefixKeys(salt, block_size=block_size).keys(token_ids)
    ]
    assert len(set(found)) == len(found) == 5 * (64 + 32 + 16 + 8 + 4)
    assert ROOT_KEY not in found


def test_a_tenants_salt_is_fixed_and_fits() -> None:
    expected = hashlib.blake2b("acmé".encode(), digest_size=32, person=b"baton tenant\0\0\0\0").digest()
    assert tenant_salt("acmé") == expected
    assert tenant_salt("acme").hex() == "16696e89142765e5e56f38ebd40b113847ec465652102e76ca983592d86b6931"
    assert tenant_salt("") == b""


def test_bad_values_are_refused() -> None:
    PrefixKeys(bytes(64), block_size=1)
    with pytest.raises(ValueError, match="65 bytes"):
        PrefixKeys(bytes(65), block_size=1)
    with pytest.raises(ValueError, match="0 tokens"):
        PrefixKeys(b"", block_size=0)


@pytest.mark.parametrize("salt", [b"", b"s", tenant_salt("acme"), bytes(64)])
def test_no_key_of_a_scale_step_is_one_of_another(salt: bytes) -> None:
    assert rope_salt(salt, 0) == salt
    tokens = list(range(12))
    keys = [PrefixKeys(rope_salt(salt, step), block_size=4).keys(tokens) for step in range(5)]
    assert len({key for of_step in keys for key in of_step}) == 5 * 3
    again = PrefixKeys(rope_salt(salt, 3), block_size=4).keys(tokens)
    assert again == keys[3]


def test_a_step_does_not_lead_to_another_tenants_keys() -> None:
    salts = [rope_salt(salt, step) for salt in (b"", b"a", b"b") for step in range(4)]
    assert len(set(salts)) == 12
    # By hand: blake2b-256 of the step as little-endian uint32, keyed with the salt.
    by_hand = hashlib.blake2b(bytes([2, 0, 0, 0]), digest_size=32, key=b"a", person=b"baton rope step")
    assert rope_salt(b"a", 2) == by_hand.digest()
