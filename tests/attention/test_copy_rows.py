"""Rows that every PCP rank holds: decodes, prompts too short to cut, several rows per request."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from heddle.layout.rows import RowClass
from heddle.step.plan import plan
from tests.support.attention_bench import call_gqa, gqa_truth, run_ranks, worst_error
from tests.support.batches import by_length, make_batch, make_topology

SIZES = [(1, 1, 1), (2, 1, 2), (1, 4, 4), (2, 2, 4), (1, 4, 2)]


@pytest.mark.parametrize("exchange", ["ag_rs", "ag_ar", "a2a", "a2a_fine"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_row_of_a_request_has_its_own_bound(
    sizes: tuple[int, int, int], exchange: str
) -> None:
    """Positions 5 to 7 on an interleave of 2: counting back from the last bound would be wrong."""
    topology = dataclasses.replace(
        make_topology(sizes, interleave=2, return_exchange=exchange, row_policy=by_length),
        dtype="float64",
        kv_cache_dtype="float64",
    )
    lengths = [(5, min(3, 2 * sizes[1] - 1)), (0, 1), (12, 1), (1, 1)]
    batch = make_batch(topology, lengths)
    assert set(plan(batch, topology).classes) == {RowClass.COPY}
    truth = gqa_truth(topology, batch, torch.float64)
    assert worst_error(topology, batch, truth, call_gqa, "reference") <= 1e-12


@pytest.mark.parametrize("exchange", ["ag_rs", "ag_ar", "a2a", "a2a_fine"])
def test_bad_numbers_of_one_request_reach_only_its_own_rows(exchange: str) -> None:
    topology = make_topology((1, 2, 2), return_exchange=exchange, row_policy=by_length)
    batch = make_batch(topology, [(9, 1), (14, 1), (6, 1)])
    truth = gqa_truth(topology, batch, torch.float32)
    truth.rows[1][3] = torch.nan
    good = torch.cat([truth.expected[0], truth.expected[2]])
    found: list[torch.Tensor] = []

    def call(attention, query, rows, heads):  # type: ignore[no-untyped-def]
        out = call_gqa(attention, query, rows, heads)
        found.append(out)
        return torch.nan_to_num(out)

    run_ranks(topology, batch, truth, call, "torch")
    assert len(found) == 2
    for out in found:
        assert out[1].isnan().all()
        torch.testing.assert_close(out[[0, 2]], good, rtol=0, atol=1e-5)
