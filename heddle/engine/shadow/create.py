"""The one-rank engine beside an engine: how it is configured, and what it costs."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

from heddle.config import AdapterConfig, EngineConfig, ParallelConfig, ResolvedConfig
from heddle.engine.shadow.shadow import GoldenEngine, Shadow
from heddle.step.topology import Topology

log = logging.getLogger("heddle.verify")

MAX_TOKENS = 1 << 15
"""Longest sequence that is computed once more; its pool holds no other."""
_MIB = 1 << 20


def shadow_config(config: EngineConfig, plan: ResolvedConfig) -> EngineConfig:
    """One rank with a pool for one sequence.

    It reads what users share through nobody's cache, takes no drafts, and nothing goes wrong in it
    on purpose. Where the ranks are threads of the caller's process, so is it.

    Args:
        config: of the engine beside.
        plan: what it became.
    """
    limit = min(plan.scheduler.max_model_len, MAX_TOKENS)
    in_process = plan.executor in ("inline", "threads")
    return dataclasses.replace(
        config,
        executor="inline" if in_process else "processes",
        cpu_comm_backend="auto",
        parallel=ParallelConfig(),
        adapters=AdapterConfig(),
        speculative=None,
        enable_fault_injection=False,
        faults=(),
        debug_kv=False,
        verify_every=0,
        trace_file=None,
        max_restarts=0,
        num_threads=1,
        cache=dataclasses.replace(
            config.cache,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=None,
            num_blocks_override=-(-limit // config.cache.block_size) + 1,
        ),
        scheduler=dataclasses.replace(
            config.scheduler,
            max_num_seqs=1,
            max_num_partial_prefills=1,
            long_prefill_token_threshold=0,
            target_itl_ms=None,
        ),
    )


def open_shadow(
    config: EngineConfig,
    plan: ResolvedConfig,
    load: Callable[[EngineConfig], GoldenEngine],
) -> Shadow:
    """Load one more rank, say what it holds, and let it wait for rows.

    Args:
        config: of the engine beside.
        plan: what it became.
        load: makes an engine.
    Raises:
        HeddleError: it does not load.
    """
    golden = load(shadow_config(config, plan))
    try:
        shadow = Shadow(golden, Topology.from_resolved(plan))
        log.info("%s", _cost_line(plan.verify_every, golden, shadow.max_tokens))
    except BaseException:
        golden.close()
        raise
    return shadow


def _cost_line(every: int, golden: GoldenEngine, max_tokens: int) -> str:
    """What is spent on looking."""
    from heddle.models.weights.open import open_weights  # these import torch
    from heddle.runner.weigh import weigh_rank

    plan = golden.driver.resolved
    held = weigh_rank(plan, 0, open_weights(Path(plan.model_path)))
    return (
        f"every {every} steps one row is computed once more by one rank of its own: "
        f"{held.weights / _MIB:.1f} MiB of weights, {held.cache / _MIB:.1f} MiB of KV, sequences "
        f"up to {max_tokens} tokens"
    )
