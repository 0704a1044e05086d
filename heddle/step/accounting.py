"""What a replica accounts with, made of an engine's settings: blocks, and what rows cost.

One definition, for engines and for those that foretell what an engine would do.
"""

from __future__ import annotations

from heddle.config.engine import ResolvedConfig
from heddle.kvcache.groups import create_group_specs
from heddle.kvcache.keys import CacheIdentity
from heddle.kvcache.manager import KVCacheManager
from heddle.scheduler.pacing import Pacer, attention_length
from heddle.step.topology import Topology


def create_cache(resolved: ResolvedConfig, topology: Topology) -> KVCacheManager:
    """The accounting of one replica, empty.

    Args:
        resolved: what runs.
        topology: constants of the engine.
    """
    parallel = resolved.parallel
    num_drafts = resolved.speculative.num_speculative_tokens if resolved.speculative else 0
    return KVCacheManager(
        num_blocks=resolved.num_blocks,
        groups=create_group_specs(
            topology.groups, parallel.kv_interleave_size, resolved.cache.block_size
        ),
        identity=CacheIdentity(
            model=f"{resolved.model_path}\n{resolved.hf_overrides}",
            kv_cache_dtype=resolved.kv_cache_dtype,
            layout_fingerprint=topology.fingerprint(),
        ),
        max_step_rows=resolved.scheduler.max_num_batched_tokens,
        enable_prefix_caching=resolved.cache.enable_prefix_caching,
        num_state_slots=resolved.num_state_slots,
        states_per_sequence=1 + num_drafts,
        rotates=parallel.cp_start_rank_rotation,
        max_pinned_tokens=resolved.cache.max_pinned_tokens,
    )


def create_pacer(resolved: ResolvedConfig) -> Pacer:
    """Bounds prompt rows beside decodes, where a target for gaps is set."""
    target_ms = resolved.scheduler.target_itl_ms
    return Pacer(
        target_seconds=None if target_ms is None else target_ms / 1000,
        max_rows=resolved.scheduler.max_num_batched_tokens,
        attention_length=attention_length(resolved.model.hidden_size),
    )
