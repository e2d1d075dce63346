"""The prefix keys of one prompt, for workers whose blocks have different sizes.

Owns which keys have been computed. The rule is baton/prefix_keys.py's. Who holds what, it does not know.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.prefix_keys import ROOT_KEY, pack_tokens, packed_block_key

# Of a packed one.
TOKEN_BYTES = 4


class PromptKeys:
    """Keys of a prompt's full blocks, per block size, each computed when it is first asked for.

    token_ids: the tokens from the start. The sequence may grow at its end, and must not change otherwise.
    salt: of the tenant, as workers get it.
    """

    def __init__(self, token_ids: Sequence[int], salt: bytes = b"") -> None:
        self.token_ids = token_ids
        self.salt = salt
        self._keys: dict[int, list[bytes]] = {}
        self._packed = b""

    @property
    def num_tokens(self) -> int:
        """Tokens there are."""
        return len(self.token_ids)

    def computed(self, block_size: int) -> list[bytes]:
        """The keys that are known already, from the first block on. For reading only."""
        return self._keys.setdefault(block_size, [])

    def all(self, block_size: int) -> list[bytes]:
        """The keys of all full blocks of that size. For reading only."""
        for _ in range(self.num_tokens // block_size - len(self.computed(block_size))):
            self.extend(block_size)
        return self.computed(block_size)

    def extend(self, block_size: int) -> bytes:
        """Computes the key of the next block of that size, which must be full. About a microsecond."""
        keys = self.computed(block_size)
        start = block_size * len(keys)
        end = start + block_size
        if end > self.num_tokens:
            raise ValueError(f"the block of {block_size} tokens at {start} is not full")
        if len(self._packed) < TOKEN_BYTES * end:
            # All that there is at once: block by block takes twice as long.
            self._packed += pack_tokens(self.token_ids[len(self._packed) // TOKEN_BYTES :])
        packed = self._packed[TOKEN_BYTES * start : TOKEN_BYTES * end]
        key = packed_block_key(self.salt, keys[-1] if keys else ROOT_KEY, packed)
        keys.append(key)
        return key
