"""How an engine runs its model: read once, at the entry point, and never changed.

No torch here: dtypes and devices are names until engine/load.py meets them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.errors import ConfigError
from engine.block_size import DEFAULT_EXPECTED_TOKENS

KERNELS = ("auto", "torch", "numba", "triton")
DTYPES = ("auto", "bfloat16", "float16", "float32")
LAYOUTS = ("HND", "NHD")
# What 0 stands for on a CPU, and on a GPU: by operator tables of others, 2,048 tokens of Llama 3.1 8B take an
# H200 about 42 ms. Not measured here.
_BY_DEVICE = {
    "kv_memory_fraction": (0.2, 0.9),
    "max_batch_tokens": (256, 4096),
    "chunk_tokens": (128, 2048),
    "mixed_tokens": (64, 512),
    "max_running": (64, 256),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How one engine runs its model.

    model: a folder, or the name of a pulled model.
    dtype: of weights and computation; "auto" is the checkpoint's.
    kv_dtype: of the cache; "auto" is that of the computation.
    device: a torch device name.  threads: intra-op threads; 0 is torch's choice.
    block_size: tokens per block; 0 chooses by the model and expected_tokens (engine/block_size.py).
    expected_tokens: mean length of prompt and answer.
    layout: order of heads and tokens within a block.
    kv_cache_bytes: size of the cache, allocated once at start; 0 is automatic: kv_memory_fraction of the
        memory that is free then, at most what max_running sequences of full length need.
    prefix_cache: keep the KV of finished requests until its blocks are needed, and reuse equal prefixes.
    max_batch_tokens: most tokens of one step.  chunk_tokens: most prompt tokens of one
        request in one step.  mixed_tokens: most prompt tokens of a step in which others decode,
        which bounds what a prompt adds to the gap between their tokens.
    max_running: most requests that hold a place in the batch.
        These five, and kv_memory_fraction, are by the device where they are 0.
    compile: compile the layers before serving; the programs are kept on disk.
    kernels: what computes the layers: "torch", "numba" on a CPU, "triton" on a GPU, or "auto", which is one
        of the latter where it suits.
    debug_nonfinite: if logits are not finite, compute the step again and name the layer where that begins.
    """

    model: str = field(default="", metadata={"help": "model folder, or the name of a pulled model"})
    dtype: str = field(
        default="auto", metadata={"help": "of weights and computation: auto, bfloat16, float16 or float32"}
    )
    kv_dtype: str = field(default="auto", metadata={"help": "of the KV cache; auto is that of the weights"})
    device: str = field(default="cpu", metadata={"help": "a torch device"})
    threads: int = field(default=0, metadata={"help": "threads of one operator; 0 is torch's choice"})
    block_size: int = field(
        default=0, metadata={"help": "tokens per block; 0 chooses by the model and expected_tokens"}
    )
    expected_tokens: int = field(
        default=DEFAULT_EXPECTED_TOKENS, metadata={"help": "mean length of prompt and answer, in tokens"}
    )
    layout: str = field(default="HND", metadata={"help": "order inside a block: HND or NHD"})
    kv_cache_bytes: int = field(
        default=0, metadata={"help": "size of the KV cache, in bytes; 0 takes kv_memory_fraction"}
    )
    kv_memory_fraction: float = field(
        default=0,
        metadata={"help": "share of the free memory for the KV cache; 0: 0.2, on a GPU 0.9"},
    )
    prefix_cache: bool = field(
        default=True, metadata={"help": "keep the KV of finished requests and reuse equal prefixes"}
    )
    max_batch_tokens: int = field(
        default=0, metadata={"help": "most tokens of one step; 0: 256, on a GPU 4096"}
    )
    chunk_tokens: int = field(
        default=0, metadata={"help": "most prompt tokens of one request in a step; 0: 128, on a GPU 2048"}
    )
    mixed_tokens: int = field(
        default=0, metadata={"help": "most prompt tokens of a step that decodes as well; 0: 64, on a GPU 512"}
    )
    max_running: int = field(default=0, metadata={"help": "most requests in the batch; 0: 64, on a GPU 256"})
    kernels: str = field(
        default="auto",
        metadata={
            "help": "torch: plain operators; numba, triton: fused kernels on a CPU, on a GPU; auto: these"
        },
    )
    compile: bool = field(
        default=False, metadata={"help": "compile the layers before serving; needs a C++ compiler"}
    )
    debug_nonfinite: bool = field(
        default=False, metadata={"help": "name the first layer of values that are not finite"}
    )

    def __post_init__(self) -> None:
        for name, values in _BY_DEVICE.items():
            if getattr(self, name) == 0:
                object.__setattr__(self, name, values[self.device != "cpu"])
        _require_choice("dtype", self.dtype, DTYPES)
        _require_choice("kv_dtype", self.kv_dtype, DTYPES)
        _require_choice("kernels", self.kernels, KERNELS)
        if self.compile and self.kernels in ("numba", "triton"):
            raise ConfigError(
                f"compile and kernels = {self.kernels} exclude each other: kernels are compiled already; "
                "set kernels to torch, or leave compile out",
                field="compile",
            )
        _require_choice("layout", self.layout, LAYOUTS)
        for key in ("threads", "block_size", "kv_cache_bytes"):
            _require_at_least(key, getattr(self, key), 0)
        for key in ("expected_tokens", "max_batch_tokens", "chunk_tokens", "mixed_tokens", "max_running"):
            _require_at_least(key, getattr(self, key), 1)
        if not 0 < self.kv_memory_fraction <= 1:
            raise ConfigError(
                f"kv_memory_fraction is {self.kv_memory_fraction}; it must be above 0 and at most 1",
                field="kv_memory_fraction",
            )
        if self.max_running >= self.max_batch_tokens:
            raise ConfigError(
                f"max_running is {self.max_running}; it must be below max_batch_tokens "
                f"({self.max_batch_tokens}), or prompts could never be computed beside the decoding requests",
                field="max_running",
            )


def _require_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{key} is {value!r}; it must be one of {', '.join(choices)}", field=key)


def _require_at_least(key: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{key} is {value}; it must be at least {least}", field=key)
