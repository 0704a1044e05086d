"""Whether replicas may advance by themselves.

With whole experts dealt over replicas, every layer of every step exchanges rows among all of them:
a replica that skips a step would leave the others waiting. So they run equally many steps, and one
without work runs empty batches.
"""

from __future__ import annotations

from heddle.config.engine import ResolvedConfig


def moves_in_lockstep(resolved: ResolvedConfig) -> bool:
    """True when each step of one replica needs a step of every other."""
    parallel = resolved.parallel
    is_shared = parallel.enable_expert_parallel and resolved.model.moe is not None
    return is_shared and parallel.data_parallel_size > 1
