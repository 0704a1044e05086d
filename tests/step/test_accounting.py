"""What a replica accounts with follows from its settings."""

from __future__ import annotations

import pytest

from heddle.config import ParallelConfig
from heddle.scheduler.pacing import StepLoad
from heddle.step.accounting import create_cache, create_pacer
from heddle.step.topology import Topology
from tests.support.fake_executor import resolved_config


@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_a_pool_holds_its_blocks_but_one_over_all_ranks_of_a_group(dcp: int) -> None:
    parallel = ParallelConfig(tensor_parallel_size=4, decode_context_parallel_size=dcp)
    resolved = resolved_config(parallel=parallel)
    cache = create_cache(resolved, Topology.from_resolved(resolved))
    blocks = resolved.num_blocks - 1
    assert cache.num_usable_blocks == blocks
    assert cache.usable_tokens == blocks * resolved.cache.block_size * dcp
    assert cache.max_step_rows == resolved.scheduler.max_num_batched_tokens


def test_a_target_for_gaps_is_told_in_seconds() -> None:
    """At 0.8 of 40 ms and a millisecond a row there is room for 32 rows."""
    pacer = create_pacer(resolved_config(target_itl_ms=40.0))
    pacer.observe(StepLoad(num_rows=100, num_prompt_rows=100, work=100.0), seconds=0.1)
    assert pacer.budget(float) == 32
    untold = create_pacer(resolved_config())
    untold.observe(StepLoad(num_rows=100, num_prompt_rows=100, work=100.0), seconds=0.1)
    assert untold.budget(float) == resolved_config().scheduler.max_num_batched_tokens
