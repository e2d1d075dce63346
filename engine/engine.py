"""One engine, assembled: model, cache, pool, scheduler, and the thread that runs it.

What both workers have in common below the network.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.errors import ConfigError, ModelError
from baton.grammars import GrammarCompiler
from baton.health import WorkerLoad
from baton.logs import get_logger
from baton.models import ModelDir
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.grammar_states import GrammarStates, Pool
from engine.kv_cache import KVCache
from engine.load import load_runner
from engine.load_log import LoadLog
from engine.mask_pool import MaskPool
from engine.model.tattletale import TattleTaleRunner
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.thread import EngineThread

if TYPE_CHECKING:
    from engine.kernels.choices import Choices

log = get_logger(__name__)

# Time for a step under way to end. Whoever stops a worker waits 10 s beyond its grace time, for this and the
# rest of its end.
CLOSE_S = 5.0


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
    mask_pool: MaskPool | None = None

    @classmethod
    async def start(cls, config: EngineConfig, model: ModelDir) -> Engine:
        """Loads the model on its own thread; raises ModelError or ConfigError."""
        clock = asyncio.get_running_loop().time
        started_s, progress = clock(), LoadLog(clock)
        thread = await EngineThread.start(lambda: load_runner(config, model, progress=progress))
        runner = thread.runner
        assert isinstance(runner, ModelRunner | TattleTaleRunner)
        if config.compile and isinstance(runner, ModelRunner):
            await _compile(thread, runner)
        await thread.call(runner.warm_up)
        shape = runner.cache.shape
        pool = BlockPool(shape.num_blocks, shape.block_size, prefix_cache=config.prefix_cache)
        mask_pool = MaskPool()
        grammars = await thread.call(lambda: grammar_states(model, mask_pool))
        scheduler = Scheduler(
            pool, model.limits, config=config, eos_token_ids=model.eos_token_ids, grammars=grammars
        )
        log.info("engine ready", seconds=round(clock() - started_s, 3))
        return cls(runner=thread, cache=runner.cache, pool=pool, scheduler=scheduler, mask_pool=mask_pool)

    def load(self, *, num_attempts: int) -> WorkerLoad:
        """How busy it is. num_attempts: those that its worker holds, running or not."""
        return WorkerLoad(
            num_attempts=num_attempts,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_free_blocks=self.pool.num_free,
            num_blocks=self.cache.shape.num_blocks,
        )

    @property
    def kernel_choices(self) -> Choices | None:
        """What the model's kernels run with; None if it is computed without."""
        runner = self.runner.runner
        return runner.kernel_choices if isinstance(runner, ModelRunner) else None

    async def stage_kv(self, max_tokens: int) -> None:
        """Where kernels run on a GPU, has them store prompts' KV a second time; see ModelRunner.stage()."""
        runner = self.runner.runner
        if self.cache.device.type != "cuda" or not isinstance(runner, ModelRunner):
            return
        if runner.kernel_choices is not None:
            await self.runner.call(lambda: runner.stage(max_tokens))

    async def close(self, timeout_s: float = CLOSE_S) -> None:
        """Ends all threads at once; those stuck for timeout_s seconds are left to the end of the process."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.runner.close(timeout_s))
            if self.mask_pool is not None:
                group.create_task(self.mask_pool.close(timeout_s))


async def _compile(thread: EngineThread, runner: ModelRunner) -> None:
    clock = asyncio.get_running_loop().time
    log.info("compiling layers")
    started_s = clock()
    compilation = await thread.call(runner.compile)
    if compilation is not None:
        log.info(
            "layers compiled",
            seconds=round(clock() - started_s, 3),
            cached="yes" if compilation.is_cached else "no",
            programs=compilation.num_programs,
        )


def grammar_states(model: ModelDir, pool: Pool) -> GrammarStates | None:
    """Where a worker's grammars are kept; None, with a line in the log, if the model allows none."""
    try:
        eos_token_ids = sorted(model.eos_token_ids)
        compiler = GrammarCompiler(model.tokenizer_path, model.limits.vocab_size, eos_token_ids)
    except (ConfigError, ModelError) as error:
        log.warning("no structured output", reason=error.message)
        return None
    return GrammarStates(compiler, pool)
