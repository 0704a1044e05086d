"""A question to the planner: model, devices, and what does not depend on the layout."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from heddle.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from heddle.errors import ConfigError
from heddle.planner.devices import Sheet


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all layouts of one question have in common."""

    model: ModelConfig
    model_name: str
    """As a command line names it."""
    model_path: str = ""
    sheet: Sheet
    num_devices: int
    dtype: str
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    max_model_len: int | None = None
    chunk_per_pcp_rank: bool = False
    """Steps have the scheduler's rows for each PCP rank, not in all: nobody fixed their number."""

    def scheduler_of(self, parallel: ParallelConfig) -> SchedulerConfig:
        """Limits of a layout's steps."""
        ranks = parallel.prefill_context_parallel_size if self.chunk_per_pcp_rank else 1
        rows = self.scheduler.max_num_batched_tokens * ranks
        return replace(self.scheduler, max_num_batched_tokens=rows)

    def devices_per_rank(self, world_size: int) -> int:
        """Cores of a rank where devices are cores; else one."""
        return max(self.num_devices // world_size, 1) if self.sheet.shares_host else 1

    def rank_memory_bytes(self, world_size: int) -> int:
        """Memory of a device, or of the cores of a rank."""
        return int(self.sheet.memory_bytes.value) * self.devices_per_rank(world_size)


class DoesNotFit(ConfigError):
    """A legal layout whose ranks would need more memory than a device has.

    Attributes:
        needed_bytes: of the rank that holds most.
    """

    def __init__(self, message: str, needed_bytes: int) -> None:
        self.needed_bytes = needed_bytes
        super().__init__(message)
