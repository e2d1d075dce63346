"""Real prompts in a sending process: the model on its engine thread, and their KV on its way meanwhile.

Owns the model, its steps, and one prompt at a time. It tells the transfer what prefill_worker/worker.py
tells it: chunks that are computed, and the layers of the last one as they are stored.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from baton.cluster.defaults import DEFAULT_MODEL
from baton.errors import ModelError
from baton.models import ModelDir
from baton.sampling import SamplingParams
from benchmarks.kv_rig import TOKEN, SendingSide
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.events import ChunkComputed, Event, TokenSampled
from engine.kv_cache import KVCache
from engine.load import load_engine
from engine.model.decoder import Decoder
from engine.model.forward_pass import StepInputs
from engine.request import Request
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.step_loop import StepLoop
from engine.stored import DONE, Stored
from engine.thread import EngineThread
from kvtransfer.contract import Committed, TransferTarget
from kvtransfer.sender import KvSource, Transfer, TransferOutcome

BLOCK_SIZE = 64
# What SmolLM2-135M is like, for a machine without it.
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """One prompt. prefill_s: until its token was sampled.

    hidden_share: of all bytes, what the receiver had stored when the last layer ended; tail_s: from the
    token to the answer to the commit. Both are None where nothing was sent.
    """

    prefill_s: float
    hidden_share: float | None = None
    tail_s: float | None = None
    outcome: TransferOutcome | None = None


class _TimedDecoder(Decoder):
    """Notes when forward() has returned: time.monotonic()."""

    returned_at = 0.0

    def __init__(self, decoder: Decoder) -> None:
        vars(self).update(vars(decoder))

    def forward(
        self,
        inputs: StepInputs,
        cache: KVCache,
        *,
        watch: Callable[[int, torch.Tensor], None] | None = None,
        stored: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """One step."""
        result = super().forward(inputs, cache, watch=watch, stored=stored)
        self.returned_at = time.monotonic()
        return result


class PrefillSide:
    """A model on one thread, and prompts for it; made by `await PrefillSide.start(...)`."""

    def __init__(self, thread: EngineThread, model: ModelDir, config: EngineConfig) -> None:
        assert isinstance(thread.runner, ModelRunner)
        assert isinstance(thread.runner.model, _TimedDecoder)
        self._thread, self._model, self._config = thread, model, config
        self.cache = thread.runner.cache
        self._decoder = thread.runner.model
        self._pool = BlockPool(self.cache.shape.num_blocks, BLOCK_SIZE, prefix_cache=False)
        self._numbers = itertools.count(1)
        self._rng = random.Random(0)

    @classmethod
    async def start(cls, max_tokens: int, folder: Path) -> PrefillSide:
        """SmolLM2-135M if it is pulled, else a random model of its shape, made in the folder."""
        model = find_model(folder)
        # 30 layers of keys and values of 3 heads of 64 elements of 2 bytes, and a block to spare.
        cache_bytes = (max_tokens + BLOCK_SIZE) * 2 * 30 * 3 * 64 * 2
        config = EngineConfig(
            threads=1,
            block_size=BLOCK_SIZE,
            kv_cache_bytes=cache_bytes,
            prefix_cache=False,
            max_running=8,
        )

        def load() -> ModelRunner:
            loaded = load_engine(config, model)
            return ModelRunner(_TimedDecoder(loaded.model), loaded.cache)

        thread = await EngineThread.start(load)
        return cls(thread, model, config)

    async def run(self, num_tokens: int, chunk_tokens: int, side: SendingSide | None = None) -> Prefill:
        """Computes a prompt in chunks of that size, and sends it unless there is no side to send it from."""
        config = replace(self._config, chunk_tokens=chunk_tokens, max_batch_tokens=chunk_tokens)
        scheduler = Scheduler(self._pool, self._model.limits, config=config)
        attempt_id, target = self._attempt(num_tokens, side)
        prompt = _Prompt(self._request(attempt_id, num_tokens), side, target)
        on_layers = prompt.on_layers if side is not None else None
        steps = StepLoop(scheduler, self._thread, prompt.on_step, on_layers=on_layers)
        began = time.monotonic()
        scheduler.add(prompt.request)
        running = asyncio.create_task(steps.run())
        try:
            await asyncio.wait((running, prompt.sampled), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await running
            return await self._result(prompt, began, side)
        finally:
            running.cancel()
            self._pool.release(prompt.request.block_ids)

    async def close(self) -> None:
        """Ends the thread."""
        await self._thread.close()

    async def _result(self, prompt: _Prompt, began: float, side: SendingSide | None) -> Prefill:
        sampled_at = prompt.sampled.result()
        prefill_s = sampled_at - began
        if side is None or prompt.transfer is None:
            return Prefill(prefill_s=prefill_s)
        outcome = await prompt.transfer
        assert outcome.outcome == Committed(), outcome
        tail_s = time.monotonic() - sampled_at
        arrivals = side.receiver.arrivals()
        hidden = sum(num_bytes for at, num_bytes in arrivals if at <= self._decoder.returned_at)
        assert sum(num_bytes for _, num_bytes in arrivals) == outcome.num_bytes
        share = hidden / outcome.num_bytes
        return Prefill(prefill_s=prefill_s, hidden_share=share, tail_s=tail_s, outcome=outcome)

    def _attempt(self, num_tokens: int, side: SendingSide | None) -> tuple[bytes, TransferTarget | None]:
        if side is None:
            return next(self._numbers).to_bytes(16, "little"), None
        return side.receiver.reserve(num_tokens)

    def _request(self, attempt_id: bytes, num_tokens: int) -> Request:
        return Request(
            attempt_id=attempt_id,
            token_ids=[self._rng.randrange(3, self._model.vocab_size) for _ in range(num_tokens)],
            num_prompt_tokens=num_tokens,
            params=SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
            prefill_only=True,
        )


class _Prompt:
    """One prompt and its transfer. sampled: when its token was, by time.monotonic()."""

    def __init__(self, request: Request, side: SendingSide | None, target: TransferTarget | None) -> None:
        self.request = request
        self.sampled: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.transfer: asyncio.Task[TransferOutcome] | None = None
        self._num_tokens = request.num_tokens
        self._side, self._target = side, target
        self._open: Transfer | None = None
        self._stored: tuple[int, Stored] = (0, DONE)

    def on_step(self, events: list[Event]) -> None:
        """A step has ended."""
        for event in events:
            assert isinstance(event, ChunkComputed | TokenSampled), event
            if isinstance(event, TokenSampled):
                self.sampled.set_result(time.monotonic())
            self._begin()
            if self._open is not None:
                self._open.blocks_ready(self.request.num_computed_tokens)

    def on_layers(self, num_layers: int, stored: Stored) -> None:
        """Layers of the last chunk are stored."""
        self._begin()
        self._stored = (num_layers, stored)
        if self._open is not None:
            self._open.layers_ready(num_layers, stored)

    def _begin(self) -> None:
        if self.transfer is None and self._side is not None and self._target is not None:
            self.transfer = asyncio.create_task(self._send(self._side, self._target))

    async def _send(self, side: SendingSide, target: TransferTarget) -> TransferOutcome:
        source = KvSource(
            attempt_id=self.request.attempt_id,
            block_ids=tuple(self.request.block_ids),
            num_tokens=self._num_tokens,
        )
        async with side.sender.transfer(source, target) as transfer:
            self._open = transfer
            transfer.blocks_ready(self.request.num_computed_tokens)
            if self._stored[0]:
                transfer.layers_ready(*self._stored)
            await self.sampled
            return await transfer.commit(TOKEN)


def find_model(folder: Path) -> ModelDir:
    """The pulled model, or a random one in the folder."""
    try:
        return ModelDir.open(DEFAULT_MODEL)
    except ModelError:
        return write_random_model(folder)


def write_random_model(folder: Path) -> ModelDir:
    """Random weights of SmolLM2-135M's shape; they have no tokenizer, and none is needed."""
    hidden, inner, kv = 576, 1536, 3 * 64
    shapes = {"model.embed_tokens.weight": (49152, hidden), "model.norm.weight": (hidden,)}
    for layer in range(30):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "self_attn.q_proj": (hidden, hidden),
                "self_attn.k_proj": (kv, hidden),
                "self_attn.v_proj": (kv, hidden),
                "self_attn.o_proj": (hidden, hidden),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }.items()
        }
    weights = {name: torch.randn(shape).mul_(0.02).bfloat16() for name, shape in shapes.items()}
    path = folder / "model.safetensors"
    save_file(weights, path)
    return ModelDir(
        path=folder,
        config=dict(SHAPE),
        generation_config={},
        chat_template=None,
        weights_files=(path,),
        manifest=None,
    )
