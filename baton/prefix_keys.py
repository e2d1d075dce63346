"""Names of cached blocks: one key per full block of a sequence, chained from its start.

    key_i = blake2b-128(key=salt)(key_{i-1} + token ids of block i as little-endian uint32)

key_{-1} is ROOT_KEY. Equal keys mean equal salt, block size and tokens from the start of the
sequence; who finds a block by its key compares the tokens all the same. The bytes are the same in
every process, on every machine and Python, so a router may compare keys of different workers.

The salt is the tenant's, and beyond scale step 0 of a length-dependent rotary embedding one derived from
it and the step: the same tokens have other KV at another step, so no key of one step matches one of another
(rope_salt(); docs/adr/0008).

Owns this rule and its version. It knows neither blocks nor who holds them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

# Part of a worker's fingerprint; changes whenever a key of the same tokens would.
KEY_VERSION = 1
KEY_BYTES = 16
# Parent of a sequence's first block.
ROOT_KEY = bytes(KEY_BYTES)
MAX_SALT_BYTES = hashlib.blake2b.MAX_KEY_SIZE


class PrefixKeys:
    """Keys of one sequence's full blocks, computed once each while the sequence grows.

    salt: at most 64 bytes; sequences share keys only if their salts are equal. b"" is a salt too.
    block_size: tokens per block.

    >>> keys = PrefixKeys(b"", block_size=2)
    >>> [key.hex()[:8] for key in keys.keys([5, 6, 7, 8, 9])]
    ['d3ce4c1c', 'ced6ba14']
    """

    def __init__(self, salt: bytes, *, block_size: int) -> None:
        if len(salt) > MAX_SALT_BYTES:
            raise ValueError(f"the salt has {len(salt)} bytes; at most {MAX_SALT_BYTES} are possible")
        if block_size < 1:
            raise ValueError(f"a block of {block_size} tokens has no key")
        self.salt = salt
        self.block_size = block_size
        self._keys: list[bytes] = []

    def keys(self, token_ids: Sequence[int]) -> list[bytes]:
        """The keys of all full blocks of a sequence.

        token_ids: the sequence from its start, each in [0, 2**32). What an earlier call was given
            must still be its beginning: those blocks are not hashed again.
        """
        num_full = len(token_ids) // self.block_size
        for index in range(len(self._keys), num_full):
            start = index * self.block_size
            parent_key = self._keys[-1] if self._keys else ROOT_KEY
            self._keys.append(block_key(self.salt, parent_key, token_ids[start : start + self.block_size]))
        return self._keys[:num_full]


def block_key(salt: bytes, parent_key: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of one block: 16 bytes."""
    return packed_block_key(salt, parent_key, pack_tokens(token_ids))


def packed_block_key(salt: bytes, parent_key: bytes, packed: bytes) -> bytes:
    """The same for token ids that pack_tokens() has packed."""
    return hashlib.blake2b(parent_key + packed, digest_size=KEY_BYTES, key=salt).digest()


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32; struct.error for an id that is none."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def rope_salt(salt: bytes, step: int) -> bytes:
    """The salt of a sequence whose tokens are computed at that scale step; at step 0 the salt itself."""
    if not step:
        return salt
    packed = struct.pack("<I", step)
    return hashlib.blake2b(packed, digest_size=32, key=salt, person=b"baton rope step").digest()


def tenant_salt(identity: str) -> bytes:
    """The salt of an authenticated identity: tenants cannot find, or time, each other's prefixes.

    An empty identity is the tenant of a server that authenticates nobody; its salt is b"".
    """
    if not identity:
        return b""
    return hashlib.blake2b(identity.encode(), digest_size=32, person=b"baton tenant").digest()


def request_salt(salt: bytes, own: str) -> bytes:
    """The salt of a request that brings one of its own; no other one, of its tenant or another, is the same.

    salt: the tenant's; without one of its own it is the request's too.
    """
    if not own:
        return salt
    return hashlib.blake2b(own.encode(), digest_size=32, key=salt, person=b"baton request").digest()
