"""What every Baton process and every user shares: the contracts, the client, errors and configuration.

Never imports torch. The client is loaded when it is first asked for, so that
the engine, which imports from here too, stays free of gRPC.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.answer import Answer, Chunk, Summary
    from baton.client import AsyncClient
    from baton.client_tls import TlsConfig
    from baton.errors import BatonError
    from baton.generation import Generation
    from baton.retry import Retry
    from baton.sampling import Grammar, SamplingParams
    from baton.sync_client import Client

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "AsyncClient",
    "BatonError",
    "Chunk",
    "Client",
    "Generation",
    "Grammar",
    "Retry",
    "SamplingParams",
    "Summary",
    "TlsConfig",
    "__version__",
]

_HOMES = {
    "Answer": "baton.answer",
    "AsyncClient": "baton.client",
    "BatonError": "baton.errors",
    "Chunk": "baton.answer",
    "Client": "baton.sync_client",
    "Generation": "baton.generation",
    "Grammar": "baton.sampling",
    "Retry": "baton.retry",
    "SamplingParams": "baton.sampling",
    "Summary": "baton.answer",
    "TlsConfig": "baton.client_tls",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'baton' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
