from __future__ import annotations

import pytest

from heddle.bench.exchange import measure_exchange
from heddle.bench.exchange_rank import OPERATIONS, SIZES
from heddle.engine.args import engine_config
from heddle.errors import ConfigError


def test_every_group_operation_and_size_is_timed(tiny_folder):
    config = engine_config(
        str(tiny_folder),
        tensor_parallel_size=1,
        prefill_context_parallel_size=2,
        decode_context_parallel_size=2,
        executor="threads",
    )
    found = measure_exchange(config)
    rows = found["collectives"]
    keys = [(row["group"], row["op"], row["bytes"]) for row in rows]
    assert keys == [(g, op, size) for g in ("pcp", "dcp") for op in OPERATIONS for size in SIZES]
    assert all(row["seconds"] > 0 and row["ranks"] == 2 for row in rows)
    believed = [row["believed_seconds"] for row in rows[: len(SIZES)]]
    assert believed == sorted(believed)
    assert believed[0] < believed[-1]


@pytest.mark.parametrize(
    "settings",
    [{}, {"data_parallel_size": 2, "tensor_parallel_size": 2}],
    ids=["one rank", "replicas"],
)
def test_a_layout_without_an_exchange_is_refused(tiny_folder, settings):
    with pytest.raises(ConfigError, match=r"no exchange to time; .*nearest: -pcp 2 -dcp 2"):
        measure_exchange(engine_config(str(tiny_folder), **settings))
