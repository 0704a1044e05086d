"""What a plan makes of the exchanges that were asked for."""

from __future__ import annotations

from typing import Any

import pytest

from heddle.layout.rows import RowClass
from heddle.step.class_plan import GroupPlan
from heddle.step.plan import plan
from tests.support.batches import by_length, make_batch, make_topology

LENGTHS = [(37, 24), (9, 1)]


def group_of(sizes: tuple[int, int, int], **fields: Any) -> GroupPlan:
    topology = make_topology(sizes, row_policy=by_length, **fields)
    (group,) = plan(make_batch(topology, LENGTHS), topology).groups
    return group


def test_an_exchange_that_does_not_fit_is_replaced_with_a_reason() -> None:
    group = group_of((2, 2, 4), return_exchange="a2a_fine", context_exchange="gather_q")
    assert group.classes[RowClass.COPY].returns == "a2a_fine"
    split = group.classes[RowClass.SPLIT]
    assert split.returns == "a2a"
    assert "since a2a_fine is for copied rows" in split.reason


@pytest.mark.parametrize("asked", ["ag_rs", "ag_ar", "a2a", "a2a_fine", "auto"])
def test_passed_queries_come_back_block_by_block(asked: str) -> None:
    group = group_of((2, 2, 4), return_exchange=asked, context_exchange="pass_q")
    split = group.classes[RowClass.SPLIT]
    assert (split.context, split.returns, split.chunks) == ("pass_q", "a2a", ())


def test_a_ring_takes_whole_shards_in_one_chunk() -> None:
    gathered = group_of((1, 4, 4), workspace=8).classes[RowClass.SPLIT]
    ring = group_of((1, 4, 4), workspace=8, context_exchange="ring_kv").classes[RowClass.SPLIT]
    assert len(gathered.chunks) > 1
    (chunk,) = ring.chunks
    assert chunk.padded_local_rows == 10  # the largest share of 37


@pytest.mark.parametrize("workspace", [1, 12, 20])
def test_with_lanes_every_group_cuts_the_context_alike(workspace: int) -> None:
    """Also a group of one, which reads in place, and queries that travel."""
    cuts = set()
    for sizes, context in (
        ((4, 1, 1), "gather_kv"),
        ((4, 1, 2), "gather_kv"),
        ((4, 1, 4), "gather_kv"),
        ((4, 1, 4), "gather_q"),
    ):
        part = group_of(sizes, workspace=workspace, context_exchange=context, lanes=4).classes[
            RowClass.SPLIT
        ]
        cuts.add(tuple(chunk.pieces for chunk in part.chunks))
        shares = [chunk.padded_local_rows for chunk in part.chunks]
        assert all(sizes[2] * share <= max(workspace, 4) for share in shares)
    (cut,) = cuts
    assert len(cut) > 1
