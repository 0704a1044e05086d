"""Size and behaviour of the KV pool."""

from __future__ import annotations

from dataclasses import dataclass

from heddle.errors import ConfigError


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
    max_pinned_tokens: int = 0
    """Tokens of the pool that pinned prefixes may hold on to; no request is promised these. 0:
    nothing can be pinned.
    """

    def __post_init__(self) -> None:
        """Check what needs neither the model nor the machine.

        Raises:
            ConfigError: pins of a negative count, or without the prefix cache that they hold.
        """
        pinned = self.max_pinned_tokens
        if type(pinned) is not int:
            raise ConfigError(f"max_pinned_tokens={pinned!r} is not legal; it is a whole number")
        if pinned < 0:
            raise ConfigError(
                f"max_pinned_tokens={pinned} is not legal; it is at least 0 (nearest: 0)"
            )
        if pinned and not self.enable_prefix_caching:
            raise ConfigError(
                f"max_pinned_tokens={pinned} is not legal without the prefix cache, for pins keep "
                "what it finds (nearest: 0, or enable_prefix_caching=True)"
            )
