"""Slots of all requests at once equal those of each request alone."""

from __future__ import annotations

import msgspec
from hypothesis import given

from heddle.step.batch import GlobalBatch
from heddle.step.localize import localize
from heddle.step.plan import plan
from heddle.step.slots import row_slots
from heddle.step.topology import Topology
from tests.support.batches import make_batch, make_topology, request_lengths, topologies


def slots_one_by_one(topology: Topology, batch: GlobalBatch, place: int) -> list[int]:
    """Each new row by itself, counted from the words of ownership."""
    ranks, run, block = topology.groups[0].world_size, topology.interleave_size, topology.block_size
    found = []
    for request in batch.requests:
        start = request.start_rank if ranks > 1 else 0
        for i in range(len(request.token_ids)):
            t = request.num_computed_tokens + i
            index = t // (ranks * run) * run + t % run
            page = request.block_tables[0][index // block]
            is_here = (t // run + start) % ranks == place
            found.append(page * block + index % block if is_here else -1)
    return found


@given(topologies(), request_lengths)
def test_each_row_has_the_slot_of_its_own_table(
    topology: Topology, lengths: list[tuple[int, int]]
) -> None:
    batch = make_batch(topology, lengths)
    step = localize(plan(batch, topology), topology, 0)
    for place in range(topology.groups[0].world_size):
        found = row_slots(step, topology, 0, place)
        assert found.tolist() == slots_one_by_one(topology, batch, place)


def test_chains_that_start_on_different_ranks_keep_apart() -> None:
    topology = make_topology((1, 4, 4), interleave=2)
    batch = make_batch(topology, [(2, 3), (0, 1), (5, 9)])
    requests = tuple(
        msgspec.structs.replace(
            request, start_rank=start, layout_fingerprint=topology.fingerprint(start)
        )
        for request, start in zip(batch.requests, (1, 0, 3), strict=True)
    )
    batch = msgspec.structs.replace(batch, requests=requests)
    step = localize(plan(batch, topology), topology, 0)
    everywhere = [row_slots(step, topology, 0, place) for place in range(4)]
    for place, found in enumerate(everywhere):
        assert found.tolist() == slots_one_by_one(topology, batch, place)
    assert (sum((found >= 0).astype(int) for found in everywhere) == 1).all()
