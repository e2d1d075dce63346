"""The router's look at a request's grammar, before a worker sees it: is it sound, is the answer complete.

Owns the compiler's whereabouts: compiling is kept off the event loop. Masks are the workers' business.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from baton.errors import ConfigError, InvalidRequest, ModelError
from baton.grammars import GrammarCompiler
from baton.logs import get_logger
from router.text import Offload

if TYPE_CHECKING:
    from baton.models import ModelDir
    from baton.sampling import Grammar

log = get_logger(__name__)


class GrammarCheck:
    """Compiles grammars of requests.

    compiler: None if this model cannot be used with grammars.
    offload: runs a function on a thread.
    reason: why there is no compiler, for clients.
    """

    def __init__(self, compiler: GrammarCompiler | None, offload: Offload, reason: str = "") -> None:
        self._compiler = compiler
        self._offload = offload
        self._reason = reason

    @classmethod
    async def of(cls, model: ModelDir, offload: Offload) -> GrammarCheck:
        """The check for a model; one that refuses every grammar, with a line in the log, if it must."""
        try:
            eos_token_ids = sorted(model.eos_token_ids)
            compiler = await offload(
                partial(GrammarCompiler, model.tokenizer_path, model.limits.vocab_size, eos_token_ids)
            )
        except (ConfigError, ModelError) as error:
            log.warning("no structured output", reason=error.message)
            # Where the model lies on this machine is nobody's business.
            return cls(None, offload, error.message.replace(f"{model.path}/", ""))
        return cls(compiler, offload)

    async def completes(self, grammar: Grammar, answers: Sequence[Sequence[int]]) -> list[bool]:
        """Whether nothing can follow each of these answers, given by their tokens.

        Raises InvalidRequest for a grammar that is not sound, naming the place.
        """
        if self._compiler is None:
            reason = f": {self._reason}" if self._reason else ""
            raise InvalidRequest(f"this model cannot be used with a grammar{reason}", field="grammar")
        return await self._offload(partial(_completes, self._compiler, grammar, answers))


def _completes(compiler: GrammarCompiler, grammar: Grammar, answers: Sequence[Sequence[int]]) -> list[bool]:
    compiled = compiler.compile(grammar)
    return [bool(tokens) and compiled.is_complete(tokens) for tokens in answers]
