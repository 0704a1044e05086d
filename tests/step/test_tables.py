"""Every new row finds its block in the short list."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from heddle.step.tables import touched_blocks
from heddle.step.topology import Topology
from tests.support.batches import make_batch, request_lengths, topologies


@given(topologies(), request_lengths)
def test_each_new_position_finds_its_block(
    topology: Topology, lengths: list[tuple[int, int]]
) -> None:
    batch = make_batch(topology, lengths)
    unit = topology.kv_layout().virtual_block_size
    ids, offsets = touched_blocks(batch.requests, 0, unit)
    for request, offset in zip(batch.requests, offsets.tolist(), strict=True):
        for index in range(len(request.token_ids)):
            block = (request.num_computed_tokens + index) // unit
            assert ids[offset + block] == request.block_tables[0][block]


@given(topologies(), request_lengths)
def test_only_touched_blocks_are_listed(topology: Topology, lengths: list[tuple[int, int]]) -> None:
    batch = make_batch(topology, lengths)
    unit = topology.kv_layout().virtual_block_size
    ids, _ = touched_blocks(batch.requests, 0, unit)
    touched = [{(cached + index) // unit for index in range(new)} for cached, new in lengths]
    assert len(ids) == sum(map(len, touched))


def test_no_requests_have_no_blocks() -> None:
    ids, offsets = touched_blocks([], 0, 4)
    assert (ids.tolist(), offsets.tolist(), ids.dtype) == ([], [], np.int64)
