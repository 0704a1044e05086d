"""Sums for wide norms are said by models that have such norms, on several ranks."""

from __future__ import annotations

from dataclasses import replace

from heddle.step.norms import norm_sums
from heddle.step.plan import plan
from heddle.step.traffic import Collective
from tests.support.batches import make_batch, make_topology


def test_one_sum_of_two_numbers_per_row_where_heads_lie_apart() -> None:
    for tp_size, has_norm, count in ((2, True, 1), (1, True, 0), (2, False, 0)):
        plain = make_topology((tp_size, 1, 1))
        topology = replace(plain, model=replace(plain.model, qk_width_norm=has_norm))
        rows = plan(make_batch(topology, [(0, 5)]), topology).rows
        expected = Collective("all_reduce", "tp", (rows.num_local_rows, 2), "float32")
        assert list(norm_sums(rows, topology)) == [expected] * count
