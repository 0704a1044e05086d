"""The whole configuration of an engine, and what it became once resolved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from heddle.config.cache import CacheConfig
from heddle.config.model import ModelConfig
from heddle.config.parallel import ParallelConfig
from heddle.config.scheduler import SchedulerConfig

ExecutorName = Literal["auto", "inline", "threads", "processes", "torchrun"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the user asked for."""

    model: str
    """`demo`, a folder, a `.gguf` file or a hub id."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    dtype: str = "auto"
    executor: ExecutorName = "auto"
    backend: str = "auto"
    """Attention backend: `torch`, `reference` or `auto`."""
    max_model_len: int | None = None
    """Window; None: the model's."""
    seed: int = 0
    num_threads: int | None = None
    """Threads of one rank; None: cores / ranks on the host, at least 1."""
    step_timeout_seconds: float = 300.0
    startup_timeout_seconds: float = 600.0
    group_timeout_seconds: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """What will run: every `auto` replaced. Plain data, so that it can be sent to rank
    processes.
    """

    model_path: str
    """Folder or `.gguf` file on this machine."""
    model: ModelConfig
    parallel: ParallelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    dtype: str
    kv_cache_dtype: str
    executor: str
    backend: str
    num_blocks: int
    """Virtual blocks of the pool, block 0 included."""
    num_threads: int
    context_workspace_tokens: int
    seed: int
    step_timeout_seconds: float
    startup_timeout_seconds: float
    group_timeout_seconds: float
    reasons: tuple[str, ...] = ()
    """What was chosen for each `auto`, and why."""
