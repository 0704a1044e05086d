"""Size and behaviour of the KV pool."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """KV pool settings."""

    block_size: int = 16
    """Tokens of one physical page on one rank."""
    kv_cache_dtype: str = "auto"
    """Type of stored rows: `auto` is the compute dtype; `int8` and `fp8_e4m3` take a byte an
    element, with a scale for each token and head.
    """
    kv_cache_memory_bytes: int | None = None
    """Pool of one rank in bytes; None: a share of the free memory."""
    num_blocks_override: int | None = None
    """Virtual blocks of the pool, whatever the memory; used by tests."""
    enable_prefix_caching: bool = True
    """Reuse the KV of shared prefixes."""
