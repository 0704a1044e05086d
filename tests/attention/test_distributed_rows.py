"""Rows that live on one PCP rank: empty chunks and pads change nothing and come out as zeros."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
import torch

from heddle.layout.rows import RowClass, RowRequest
from heddle.step.localize import localize
from heddle.step.placement import Placed
from heddle.step.plan import plan
from tests.support.attention_bench import call_gqa, gqa_truth, run_ranks, worst_error
from tests.support.batches import by_length, make_batch, make_topology


@pytest.mark.parametrize("new", range(1, 12))
@pytest.mark.parametrize("pcp_size", [2, 3, 4])
def test_a_split_of_any_length_equals_dense(pcp_size: int, new: int) -> None:
    """Fewer rows than chunks leave chunks, and whole ranks, empty."""
    topology = dataclasses.replace(
        make_topology((1, pcp_size, pcp_size)),
        dtype="float64",
        kv_cache_dtype="float64",
        row_policy=lambda requests, _: Placed(
            tuple(RowRequest(len(r.token_ids), RowClass.SPLIT) for r in requests), ()
        ),
    )
    batch = make_batch(topology, [(0, new), (7, new)])
    truth = gqa_truth(topology, batch, torch.float64)
    assert worst_error(topology, batch, truth, call_gqa, "reference") <= 1e-12


def test_pads_come_out_as_zeros() -> None:
    topology = make_topology((1, 3, 1), row_policy=by_length)
    batch = make_batch(topology, [(0, 10), (4, 7)])
    truth = gqa_truth(topology, batch, torch.float32)
    outs: dict[str, torch.Tensor] = {}

    def call(attention, query, rows, heads):  # type: ignore[no-untyped-def]
        out = call_gqa(attention, query, rows, heads)
        outs[threading.current_thread().name] = out
        return out

    run_ranks(topology, batch, truth, call, "torch")
    step_plan = plan(batch, topology)
    valid = step_plan.rows.valid.reshape(3, -1)
    assert not valid.all()
    for rank in range(3):
        out = outs[f"rank{rank}"]
        pads = np.flatnonzero(~valid[rank])
        assert (localize(step_plan, topology, rank).token_ids[pads] == 0).all()
        assert (out[pads] == 0).all()
