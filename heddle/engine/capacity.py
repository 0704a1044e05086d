"""How many tokens an engine stores, and how long a prompt it takes; known before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from heddle.config.engine import ResolvedConfig
from heddle.engine.replica import Replica
from heddle.step.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """In tokens."""

    kv_tokens_total: int
    """That the pools of all replicas store."""
    longest_prompt: int
    """Longest prompt that is accepted, with room for one token after it."""
    prefix_unit: int
    """Of the prefix cache: tokens of a virtual block."""

    @classmethod
    def of(cls, plan: ResolvedConfig) -> Capacity:
        """What a plan has room for; its replicas are alike."""
        cache = Replica(0, plan, Topology.from_resolved(plan)).cache
        per_replica = cache.num_usable_blocks * cache.virtual_block_size
        return cls(
            kv_tokens_total=per_replica * plan.parallel.data_parallel_size,
            longest_prompt=min(plan.scheduler.max_model_len - 1, cache.usable_tokens),
            prefix_unit=cache.virtual_block_size,
        )
