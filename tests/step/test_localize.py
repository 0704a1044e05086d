"""Every row of a step carries its own token, on each rank that computes it."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given

from heddle.layout.rows import RowClass
from heddle.step.plan import plan
from heddle.step.topology import Topology
from tests.support.batches import make_batch, request_lengths, topologies
from tests.support.following import steps_of


@given(topologies(), request_lengths)
def test_rows_carry_their_own_token_and_position(
    topology: Topology, lengths: list[tuple[int, int]]
) -> None:
    batch = make_batch(topology, lengths)
    truth = [
        (token, request.num_computed_tokens + i)
        for request in batch.requests
        for i, token in enumerate(request.token_ids)
    ]
    classes = plan(batch, topology).classes
    copied = sum(
        len(request.token_ids)
        for request, row_class in zip(batch.requests, classes, strict=True)
        if row_class is RowClass.COPY
    )
    for tp_rank in range(topology.mesh.tp_size):
        rows: list[tuple[int, int]] = []
        for step in steps_of(topology, batch):
            if step.tp_rank != tp_rank:
                continue
            assert step.num_copy == copied
            valid = plan(batch, topology).rows.valid.reshape(topology.mesh.pcp_size, -1)
            kept = np.flatnonzero(valid[step.pcp_rank])
            found = [(int(step.token_ids[j]), int(step.positions[j])) for j in kept]
            rows += found if step.pcp_rank == 0 else found[copied:]
        assert Counter(rows) == Counter(truth)
