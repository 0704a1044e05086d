from __future__ import annotations

import pytest

from heddle.planner.shares import distinct_shares
from heddle.planner.weights import rank_weights
from tests.support.planned import engine_for, settings_for


@pytest.mark.parametrize(
    ("name", "sizes", "deals"),
    [
        ("llama-3.1-8b", (8, 1, 1), False),
        ("gpt-oss-20b", (7, 1, 1), False),
        ("qwen3-next-80b-a3b", (3, 2, 1), True),
        ("deepseek-v3", (5, 3, 15), True),
    ],
)
def test_every_rank_weighs_what_the_first_of_its_kind_weighs(name, sizes, deals) -> None:
    settings = settings_for(name, "B200", 16, memory=2e12)
    engine = engine_for(settings, *sizes, enable_expert_parallel=deals)
    topology, world = engine.topology, range(engine.parallel.world_size)
    kinds = distinct_shares(topology, 0)
    assert kinds[0] == 0
    assert len(kinds) < len(world)

    def weigh(rank: int) -> int:
        return rank_weights(engine.resolved, topology, rank).num_bytes

    assert {weigh(rank) for rank in world} == {weigh(rank) for rank in kinds}
    assert engine.memory.weights == max(map(weigh, kinds))
