"""The sheet of memory by rank, as operators see it."""

from __future__ import annotations

from heddle.config import EngineConfig, ParallelConfig
from heddle.engine.machine import resolve_here
from heddle.server.memory_plan import predicted_bytes
from heddle.server.metric_table import MEMORY_PARTS


def test_each_rank_has_all_parts_and_layouts_move_them() -> None:
    def of(**degrees: int) -> dict[int, dict[str, int]]:
        config = EngineConfig(model="demo", executor="threads", parallel=ParallelConfig(**degrees))
        return predicted_bytes(resolve_here(config))

    alone = of()
    halved = of(tensor_parallel_size=2)
    copied = of(prefill_context_parallel_size=2)
    assert list(alone) == [0]
    assert list(halved) == list(copied) == [0, 1]
    assert set(alone[0]) == set(MEMORY_PARTS)
    assert halved[0]["weights"] < alone[0]["weights"] == copied[1]["weights"]
    assert alone[0]["kv_pool"] > 0
    assert alone[0]["states"] == 0
