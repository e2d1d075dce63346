"""Reads a checkpoint's tensors, each once, into memory that is the caller's.

safetensors only, memory-mapped while it is read; nothing stays mapped. Everything that can be
wrong with a checkpoint becomes a ModelError naming the file or the tensor. Which tensors an
architecture has, and what becomes of them, is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from baton.errors import ModelError

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

# What a weight may be stored as: safetensors' names. Anything else is a quantized checkpoint's.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# Of a tensor that is compared and not kept: some megabytes at a time.
_COMPARED_ROWS = 1024

# Called with the bytes read so far and those that there are to read.
Report = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor as its file's header describes it. dtype: safetensors' name of it."""

    path: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its size in the file, in bytes; of one whose dtype cannot be read only about that."""
        dtype = _DTYPES.get(self.dtype)
        return math.prod(self.shape) * (1 if dtype is None else dtype.itemsize)


class Checkpoint:
    """The tensors of one or more safetensors files.

    device: where tensors are put.
    dtype: what tensors are converted to; None keeps the embedding's dtype for all (the head's without one).
    report: called after each tensor.
    Raises ModelError for a file that cannot be read and for a tensor that two files have.
    """

    def __init__(
        self,
        files: Sequence[Path],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        report: Report | None = None,
    ) -> None:
        self._readers: dict[Path, Any] = {}
        self._stored: dict[str, _Stored] = {}
        for path in files:
            self._read_header(path)
        self._unread = set(self._stored)
        self._folder = files[0].parent if files else Path()
        self.device = torch.device(device)
        self._report = report
        self._bytes_read = 0
        self.total_bytes = sum(stored.num_bytes for stored in self._stored.values())
        first = HEAD if self.has(HEAD) and not self.has(EMBEDDING) else EMBEDDING
        self.dtype = dtype or _DTYPES[self._find(first).dtype]

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._stored

    def take(self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor in memory of its own on the device, in dtype (None: the checkpoint's).

        Raises ModelError if it is missing, has another shape, or cannot be had in that dtype.
        """
        # Before memory is asked for: a wrong size in config.json may ask for any amount.
        self._find_shaped(name, shape)
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self.take_into(out, name)
        return out

    def take_into(self, out: torch.Tensor, name: str) -> None:
        """The same into an allocated tensor, or a part of one, in its shape and dtype."""
        stored = self._find_shaped(name, tuple(out.shape))
        out.copy_(self._reader(stored.path).get_tensor(name))
        if out.dtype is torch.float16 and stored.dtype != "F16":
            _check_range(out, name, stored)
        self._mark_read({name})

    def holds(self, tensor: torch.Tensor, name: str) -> bool:
        """Whether the stored tensor, once converted, has these values; it is compared in parts."""
        stored = self._find_shaped(name, tuple(tensor.shape))
        parts = torch.split(self._reader(stored.path).get_tensor(name), _COMPARED_ROWS)
        return all(
            torch.equal(part.to(tensor), taken)
            for part, taken in zip(parts, torch.split(tensor, _COMPARED_ROWS), strict=True)
        )

    def ignore(self, *suffixes: str) -> None:
        """Tensors whose names end like this carry nothing that the decoder needs."""
        self._mark_read({name for name in self._unread if name.endswith(suffixes)})

    def check_all_read(self) -> None:
        """Raises ModelError if the checkpoint has tensors that nobody took: the model would differ."""
        if self._unread:
            name = min(self._unread)
            raise ModelError(
                f"{self._stored[name].path}: {len(self._unread)} tensors are not used by this architecture, "
                f"{name} among them; config.json does not describe this checkpoint"
            )

    def release(self) -> None:
        """Unmaps what was read. Files are opened again when needed, at the price of their headers."""
        self._readers.clear()

    def _read_header(self, path: Path) -> None:
        reader = self._reader(path)
        for name in list(reader.keys()):
            if name in self._stored:
                raise ModelError(
                    f"{path} and {self._stored[name].path} both have a tensor {name}; "
                    "they belong to different models, pull the model again"
                )
            header = reader.get_slice(name)
            self._stored[name] = _Stored(path, header.get_dtype(), tuple(header.get_shape()))

    def _reader(self, path: Path) -> Any:
        if path not in self._readers:
            self._readers[path] = _open(path)
        return self._readers[path]

    def _find(self, name: str) -> _Stored:
        stored = self._stored.get(name)
        if stored is None:
            raise ModelError(f"{self._folder}: {self._why_missing(name)}")
        if stored.dtype not in _DTYPES:
            raise ModelError(
                f"{stored.path}: tensor {name} is stored as {stored.dtype}; quantized checkpoints are not "
                "supported, pull one in bfloat16, float16 or float32"
            )
        return stored

    def _find_shaped(self, name: str, shape: tuple[int, ...]) -> _Stored:
        stored = self._find(name)
        if stored.shape != shape:
            raise ModelError(
                f"{stored.path}: tensor {name} has shape {stored.shape}, config.json asks for {shape}; "
                "the two belong to different models: pull the model again, or correct config.json"
            )
        return stored

    def _mark_read(self, names: set[str]) -> None:
        self._bytes_read += sum(self._stored[name].num_bytes for name in names & self._unread)
        self._unread -= names
        if self._report is not None:
            self._report(self._bytes_read, self.total_bytes)

    def _why_missing(self, name: str) -> str:
        if name == HEAD:
            return (
                f"the checkpoint has no tensor {HEAD}, and by config.json the embedding is not the head "
                "(tie_word_embeddings); a model without a head cannot generate, pull the model again"
            )
        other = self._other_name(name)
        if other is not None:
            return (
                f"the checkpoint has {other} where {name} is expected: it was saved from another class than "
                "config.json names, for example without its head. Save it from that class (transformers: "
                "AutoModelForCausalLM), or pull the model again"
            )
        odd = (entry for entry, stored in self._stored.items() if stored.dtype not in _DTYPES)
        packed = min(odd, default=None)
        if packed is not None:
            return (
                f"the checkpoint has no tensor {name}, but {packed} as {self._stored[packed].dtype}; "
                "quantized checkpoints are not supported, pull one in bfloat16, float16 or float32"
            )
        return f"the checkpoint has no tensor {name}, which config.json asks for; pull the model again"

    def _other_name(self, name: str) -> str | None:
        """A tensor of that name but for what stands before: other classes prefix it in another way."""
        bare = name.removeprefix("model.")
        others = (entry for entry in self._stored if entry == bare or entry.endswith(f".{bare}"))
        return min(others, default=None)


def _check_range(out: torch.Tensor, name: str, stored: _Stored) -> None:
    low, high = torch.aminmax(out)
    if not (low.isfinite() and high.isfinite()):
        raise ModelError(
            f"{stored.path}: tensor {name} is stored as {stored.dtype} and does not fit float16; "
            "use bfloat16 or float32"
        )


def _open(path: Path) -> Any:
    try:
        # Mapped, not read: pages come in when a tensor is first touched.
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read ({error}); pull the model again") from error
