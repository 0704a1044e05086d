"""New rows arrive where they are stored and seen, whichever way they came."""

from __future__ import annotations

from hypothesis import given

from heddle.step.local_group import localize_group
from heddle.step.topology import Topology
from tests.support.batches import make_batch, request_lengths, topologies
from tests.support.following import owner_and_slot, received_tags, steps_of
from tests.support.visible import seen_by


@given(topologies(), request_lengths)
def test_self_segments_see_the_new_keys_that_their_rule_shows(
    topology: Topology, lengths: list[tuple[int, int]]
) -> None:
    """Whichever way the new rows came."""
    batch = make_batch(topology, lengths)
    ids = [request.request_id for request in batch.requests]
    steps = steps_of(topology, batch)
    groups = [localize_group(step, topology, 0) for step in steps]
    for rank, (step, group) in enumerate(zip(steps, groups, strict=True)):
        if not group.classes:
            continue
        received = received_tags(topology, steps, groups, rank)
        fresh = [received[j] for j in group.new_order]
        for rows in group.classes:
            for segment in rows.segments:
                cached = batch.requests[segment.request].num_computed_tokens
                for row in range(segment.start, segment.end):
                    position = int(step.positions[rows.start + row])
                    met = [
                        fresh[view.start + key]
                        for view in segment.views
                        for key in range(
                            int(view.ranges.first[row - segment.start]),
                            int(view.ranges.end[row - segment.start]),
                        )
                    ]
                    seen = seen_by(topology.groups[0].visibility, position)
                    expected = [(ids[segment.request], t) for t in seen if t >= cached]
                    assert sorted(met) == expected


@given(topologies(), request_lengths)
def test_a_row_that_arrives_is_stored_in_its_own_slot(
    topology: Topology, lengths: list[tuple[int, int]]
) -> None:
    batch = make_batch(topology, lengths)
    tables = {request.request_id: request.block_tables[0] for request in batch.requests}
    steps = steps_of(topology, batch)
    groups = [localize_group(step, topology, 0) for step in steps]
    for rank, group in enumerate(groups):
        place = topology.group_position(0, rank)
        received = received_tags(topology, steps, groups, rank) if group.classes else []
        slots = group.slot_mapping[len(group.slot_mapping) - len(received) :]
        for tag, slot in zip(received, slots.tolist(), strict=True):
            if slot >= 0:
                assert tag is not None
                assert owner_and_slot(topology, tables[tag[0]], tag[1]) == (place, slot)
