"""From what was asked to what will run: every `auto` replaced, each choice with its reason.

Pure: the caller measures the machine and passes plain numbers. Legality is asked of `heddle.layout.rules`, once, here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from heddle.config import EngineConfig, ModelConfig, ParallelConfig, ResolvedConfig, SchedulerConfig
from heddle.errors import ConfigError
from heddle.layout import rules
from heddle.layout.pool import DTYPE_BYTES, PoolRequest, pool_blocks

_EXECUTORS = ("inline", "threads", "processes", "torchrun")
_BACKENDS = ("torch", "reference")
_WORKSPACE_CHUNKS = 4


@dataclass(slots=True)
class _Reasons:
    """Sentences about what `auto` became."""

    lines: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        self.lines.append(line)


def resolve(
    config: EngineConfig,
    model: ModelConfig,
    *,
    free_memory_bytes: int,
    num_cores: int,
    ranks_on_host: int | None = None,
    model_path: str,
) -> ResolvedConfig:
    """Replace every `auto` by a value.

    Args:
        config: what the user asked for.
        model: shapes of the checkpoint.
        free_memory_bytes: free memory of the host with the least.
        num_cores: cores of that host.
        ranks_on_host: ranks that share it; None: all of them.
        model_path: folder or file of the checkpoint on this machine.
    Raises:
        TopologyError: the layout is not legal; carries all reasons and the nearest legal layouts.
        ConfigError: another setting is not legal.
    """
    reasons = _Reasons()
    window = _window(config, model)
    rules.check(
        config.parallel,
        block_size=config.cache.block_size,
        model=model,
        max_model_len=window,
    )
    scheduler = replace(config.scheduler, max_model_len=window)
    _check_scheduler(scheduler)
    ranks = config.parallel.world_size if ranks_on_host is None else ranks_on_host
    dtype = _dtype(config, reasons)
    executor = _executor(config, reasons)
    request = PoolRequest(
        cache=config.cache,
        parallel=config.parallel,
        model=model,
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=window,
        kv_dtype=_kv_dtype(config, dtype, reasons),
        free_memory_bytes=free_memory_bytes,
        ranks_on_host=ranks,
    )
    num_blocks, why = pool_blocks(request)
    reasons.say(why)
    return ResolvedConfig(
        model_path=model_path,
        model=model,
        parallel=config.parallel,
        cache=config.cache,
        scheduler=scheduler,
        dtype=dtype,
        kv_cache_dtype=request.kv_dtype,
        executor=executor,
        backend=_backend(config, reasons),
        num_blocks=num_blocks,
        num_threads=_threads(config, executor, num_cores, ranks, reasons),
        context_workspace_tokens=_workspace(config.parallel, scheduler, reasons),
        seed=config.seed,
        step_timeout_seconds=config.step_timeout_seconds,
        startup_timeout_seconds=config.startup_timeout_seconds,
        group_timeout_seconds=config.group_timeout_seconds,
        reasons=tuple(reasons.lines),
    )
