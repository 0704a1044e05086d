"""Frozen settings. Nothing here imports torch, and nothing is mutated after construction."""

from heddle.config.adapters import AdapterConfig
from heddle.config.cache import CacheConfig
from heddle.config.engine import EngineConfig, ResolvedConfig
from heddle.config.model import MLAConfig, ModelConfig, MoEConfig, RopeConfig
from heddle.config.parallel import ParallelConfig
from heddle.config.sampling import RequestOutputKind, SamplingParams
from heddle.config.scheduler import SchedulerConfig
from heddle.config.speculative import SpeculativeConfig
from heddle.config.structured import StructuredOutputsParams

__all__ = [
    "AdapterConfig",
    "CacheConfig",
    "EngineConfig",
    "MLAConfig",
    "MoEConfig",
    "ModelConfig",
    "ParallelConfig",
    "RequestOutputKind",
    "ResolvedConfig",
    "RopeConfig",
    "SamplingParams",
    "SchedulerConfig",
    "SpeculativeConfig",
    "StructuredOutputsParams",
]
