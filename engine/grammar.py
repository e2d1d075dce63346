"""Where one answer stands in its grammar.

Owns the matcher of one request and nothing else: a function of the grammar and the tokens of the
answer so far, so a resumed request continues with the masks it would have had. Plain and synchronous;
when and on which thread masks are computed is for engine/grammar_states.py to say.

Ends: every end-of-sequence id of the model is allowed where the answer may end, from min_tokens
tokens on and without ignore_eos; before, or with it, only where no other token is allowed. An
answer that nothing can follow is complete, whatever min_tokens and ignore_eos say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from baton.errors import InternalError, InvalidRequest
from engine.token_mask import TokenMask, UInt32Array

if TYPE_CHECKING:
    from baton.grammars import CompiledGrammar


class GrammarState:
    """The state of one answer; made by `GrammarState.of(...)`.

    Not for several threads at once, except that a mask may be computed on another one.
    """

    def __init__(self, compiled: CompiledGrammar, *, ignore_eos: bool, min_tokens: int) -> None:
        self._compiled = compiled
        self._ignore_eos = ignore_eos
        self._min_tokens = min_tokens
        self._token_ids: list[int] = []
        self._matcher = compiled.matcher()
        self._is_renewed = False
        self._is_complete = False
        self._mask: TokenMask | None = None

    @classmethod
    def of(
        cls,
        compiled: CompiledGrammar,
        token_ids: Sequence[int] = (),
        *,
        ignore_eos: bool = False,
        min_tokens: int = 0,
    ) -> GrammarState:
        """The state after the tokens of the answer so far, in about a microsecond per token.

        Raises InvalidRequest if they do not match the grammar.
        """
        state = cls(compiled, ignore_eos=ignore_eos, min_tokens=min_tokens)
        state._token_ids = list(token_ids)
        if (num_taken := state._replay()) < len(token_ids):
            raise InvalidRequest(
                f"token {num_taken} of the answer so far, id {token_ids[num_taken]}, is against the grammar",
                field="grammar",
            )
        state._note_end()
        return state

    @property
    def is_complete(self) -> bool:
        """Whether nothing but the end may follow: the request ends here, with reason STOP."""
        return self._is_complete

    def advance(self, token_id: int) -> None:
        """Takes the next token of the answer; its mask must have been used, or nobody wants it any more.

        What goes wrong is raised by the next mask's bits().
        """
        if self._mask is not None:
            self._mask.drop()
            self._mask = None
        self._token_ids.append(token_id)
        self._matcher.consume_token(token_id)
        self._note_end()

    def mask(self) -> TokenMask:
        """What may come next; the same object until advance(). Nothing is computed here."""
        if self._mask is None:
            self._mask = TokenMask(self._bits)
        return self._mask

    def _note_end(self) -> None:
        # Noted, because the matcher cannot be asked while another thread computes its mask.
        self._is_complete = self._matcher.is_stopped() and not self._matcher.is_error()

    def _bits(self) -> UInt32Array:
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            if (num_taken := self._replay()) < len(self._token_ids):
                raise InternalError(
                    f"token {num_taken} of the answer was sampled although the grammar forbids it"
                )
            bits = self._matcher.compute_bitmask()
            self._require_sound()
        # llguidance appends a word when the vocabulary fills the last one.
        num_words = -(-self._compiled.vocab_size // 32)
        return self._without_early_end(np.frombuffer(bits, np.uint32)[:num_words])

    def _replay(self) -> int:
        """Catches up with the tokens; how many the grammar allows.

        Once, with a lexer of its own: other answers may have filled the shared one.
        """
        if self._matcher.is_error():
            if self._is_renewed:
                self._require_sound()
            self._matcher = self._compiled.renew()
            self._is_renewed = True
        num_taken = self._matcher.try_consume_tokens(self._token_ids)
        if not self._matcher.is_error():
            return num_taken
        return self._replay()

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("<non-verbose/>")[0].strip()
            raise InvalidRequest(
                f"the grammar is too complex after {len(self._token_ids)} tokens of the answer ({reason}); "
                "simplify it",
                field="grammar",
            )

    def _without_early_end(self, bits: UInt32Array) -> UInt32Array:
        if not self._ignore_eos and len(self._token_ids) >= self._min_tokens:
            return bits
        going_on = bits.copy()
        for token_id in self._compiled.eos_token_ids:
            going_on[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
        going_on.flags.writeable = False
        return going_on if going_on.any() else bits
