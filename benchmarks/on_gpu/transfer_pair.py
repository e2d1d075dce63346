"""A prefill and a decode process on one device, and prompts that go from one to the other.

Owns the two processes and the socket between them. What is measured or checked is not known here.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.on_gpu.section import Budget
from benchmarks.on_gpu.transfer_child import Child

if TYPE_CHECKING:
    import torch

# Longer than anything takes but the first start on a GPU, where kernels are compiled.
_LOAD_S = 120.0
_ASK_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the two processes hold.

    size: of benchmarks.on_gpu.transfer_model.SIZES.  num_tokens: of each cache.  chunk_tokens: of a prompt.
    frame_bytes: most of one frame, ever.  stall_s: that one step of a transfer may take.
    """

    size: str
    num_tokens: int
    chunk_tokens: int
    frame_bytes: int
    stall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Random tokens.  num_new: that are computed behind it.  frame_bytes: most of one frame of its KV."""

    seed: int
    num_tokens: int
    num_new: int
    frame_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A prompt that went over.

    compute_s: of the prompt.  computed_at: when its last layer was, as every time by time.monotonic().
    arrivals: (time, bytes) of each frame that was stored.
    num_bytes, duration_s: from the first frame to the receiver's answer.
    counters: of the sender's reader.
    """

    tokens: list[int]
    compute_s: float
    computed_at: float
    arrivals: list[tuple[float, int]]
    num_bytes: int
    duration_s: float
    decode_s: float
    counters: dict[str, int]


class Pair:
    """Two processes; close() ends them. Whatever raises leaves them unusable for everything else.

    folder: is made.
    """

    def __init__(self, device: torch.device, folder: Path, load: Load, budget: Budget) -> None:
        self._device = device
        # For its owner only.
        folder.mkdir(mode=0o700)
        self._folder = folder
        self._budget = budget
        self._numbers = itertools.count(1)
        self._load: Load | None = None
        self._peer: dict[str, Any] = {}
        self.decode = Child("decode")
        self.prefill = Child("prefill")
        try:
            self.load(load)
        except BaseException:
            self.close()
            raise

    def load(self, load: Load) -> None:
        """Other models, unless they are there already."""
        if load == self._load:
            return
        self._load = load
        address = str(self._folder / f"kv-{next(self._numbers)}")
        self.decode.tell(
            "load", size=load.size, device=str(self._device), num_tokens=load.num_tokens, address=address
        )
        self._tell_prefill(load)
        self._peer = self.decode.hear(self.seconds(_LOAD_S))
        self._connect()

    def renew_prefill(self) -> None:
        """A new prefill process in the place of the old one."""
        self.prefill.close()
        self.prefill = Child("prefill")
        self._tell_prefill(self._loaded)
        self._connect()

    def begin(self, prompt: Prompt, when: str, hold_after: int | None = None) -> str:
        """Has a prompt computed and sent, and returns the attempt. when: as the prefill role has it."""
        attempt = f"{next(self._numbers):032x}"
        lease_id = self.ask(
            self.decode,
            "reserve",
            attempt=attempt,
            num_tokens=prompt.num_tokens,
            num_new=prompt.num_new,
            hold_after=hold_after,
        )
        target = {"attempt": attempt, "lease_id": lease_id, **self._peer}
        self.prefill.tell(
            "prefill", **self._of(prompt), target=target, when=when, frame_bytes=prompt.frame_bytes
        )
        return attempt

    def move(self, prompt: Prompt, when: str = "meanwhile", *, keeps_kv: bool = False) -> Moved:
        """Sends a prompt over and has its tokens computed there.

        keeps_kv: for alone(), which is to be next.
        """
        attempt = self.begin(prompt, when)
        self.decode.tell("answer", attempt=attempt, num_new=prompt.num_new, keeps_kv=keeps_kv)
        sent = self.prefill.hear(self.seconds(_ASK_S))
        got = self.decode.hear(self.seconds(_ASK_S))
        return Moved(
            tokens=got["tokens"],
            compute_s=sent["compute_s"],
            computed_at=sent["computed_at"],
            arrivals=[(at, num_bytes) for at, num_bytes in got["arrivals"]],
            num_bytes=sent["num_bytes"],
            duration_s=sent["duration_s"],
            decode_s=got["decode_s"],
            counters=sent["counters"],
        )

    def compute(self, prompt: Prompt) -> float:
        """Seconds that the prefill process takes for a prompt that goes nowhere."""
        done = self.ask(self.prefill, "compute", **self._of(prompt))
        return float(done["compute_s"])

    def alone(self, prompt: Prompt) -> tuple[list[int], float]:
        """A prompt's tokens, all computed in the decode process, and how far the KV that was kept is off."""
        done = self.ask(self.decode, "alone", **self._of(prompt), num_new=prompt.num_new)
        return done["tokens"], done["kv_error"]

    def ask(self, child: Child, name: str, **arguments: Any) -> Any:
        """A command's result."""
        return child.ask(name, self.seconds(_ASK_S), **arguments)

    def has(self, seconds: float) -> bool:
        """Whether the budget has so many seconds left."""
        return self._budget.has(seconds)

    def seconds(self, most: float) -> float:
        """So many, or fewer if the budget has fewer."""
        return min(most, self._budget.left)

    def close(self) -> None:
        """Ends both processes. Idempotent."""
        self.prefill.close()
        self.decode.close()

    @property
    def _loaded(self) -> Load:
        assert self._load is not None, "the constructor loads"
        return self._load

    def _tell_prefill(self, load: Load) -> None:
        self.prefill.tell(
            "load",
            size=load.size,
            device=str(self._device),
            num_tokens=load.num_tokens,
            chunk_tokens=load.chunk_tokens,
            frame_bytes=load.frame_bytes,
            stall_s=load.stall_s,
        )

    def _connect(self) -> None:
        self.prefill.hear(self.seconds(_LOAD_S))
        self.ask(self.prefill, "pair", **self._peer)

    def _of(self, prompt: Prompt) -> dict[str, int]:
        return {
            "seed": prompt.seed,
            "num_tokens": prompt.num_tokens,
            "chunk_tokens": self._loaded.chunk_tokens,
        }
