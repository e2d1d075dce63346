"""One engine, assembled: model, cache, pool, scheduler, and the thread that runs it.

What both workers have in common below the network.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.models import ModelDir
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.kv_cache import KVCache
from engine.runner import ModelRunner, load_engine
from engine.scheduler import Scheduler
from engine.thread import EngineThread


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine that is loaded and has run one step to warm up.

    Everything but the thread belongs to the event loop that started it; the
    cache is written by the thread in steps and by the event loop for blocks that no
    step touches.
    """

    runner: EngineThread
    cache: KVCache
    pool: BlockPool
    scheduler: Scheduler

    @classmethod
    async def start(cls, config: EngineConfig, model: ModelDir) -> Engine:
        """Loads the model on its own thread; raises ModelError or ConfigError."""
        thread = await EngineThread.start(lambda: load_engine(config, model))
        runner = thread.runner
        assert isinstance(runner, ModelRunner)
        await thread.call(runner.warm_up)
        shape = runner.cache.shape
        pool = BlockPool(shape.num_blocks, shape.block_size)
        scheduler = Scheduler(pool, model.limits, config=config, eos_token_ids=model.eos_token_ids)
        return cls(runner=thread, cache=runner.cache, pool=pool, scheduler=scheduler)

    async def close(self) -> None:
        """Ends the engine thread."""
        await self.runner.close()
