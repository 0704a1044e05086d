from __future__ import annotations

from heddle.config import ParallelConfig
from heddle.layout.layout_object import layout_object


def test_the_keys_and_where_their_values_come_from():
    parallel = ParallelConfig(
        tensor_parallel_size=2,
        prefill_context_parallel_size=3,
        decode_context_parallel_size=6,
        kv_interleave_size=4,
        dcp_comm_backend="a2a",
    )
    assert layout_object(parallel, block_size=8, executor="threads") == {
        "tp": 2,
        "pcp": 3,
        "dcp": 6,
        "pp": 1,
        "dp": 1,
        "interleave": 4,
        "block_size": 8,
        "exchange": "a2a",
        "executor": "threads",
        "world_size": 6,
    }
