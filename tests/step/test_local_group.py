"""Every slot and key of a plan reaches exactly the ranks that it should.

The expectations use their own copy of the placement formulas.
"""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
from hypothesis import given

from heddle.step.batch import GlobalBatch
from heddle.step.coverage import expected_coverage
from heddle.step.local_group import ClassStep, localize_group
from heddle.step.topology import Topology
from heddle.step.views import LocalRange, Ranges
from tests.support.batches import by_length, make_batch, make_topology, request_lengths, topologies
from tests.support.following import groups_of, owner_and_slot, steps_of, store_copies
from tests.support.visible import seen_by


@given(topologies(), request_lengths)
def test_each_new_position_is_written_once_per_store_copy(
    topology: Topology, lengths: list[tuple[int, int]]
) -> None:
    batch = make_batch(topology, lengths)
    groups = groups_of(topology, batch)
    expected = Counter(
        owner_and_slot(topology, request.block_tables[0], request.num_computed_tokens + i)
        for request in batch.requests
        for i in range(len(request.token_ids))
    )
    for copy in store_copies(topology):
        written = Counter(
            (place, int(slot))
            for place, rank in enumerate(copy)
            for slot in groups[rank].slot_mapping
            if slot >= 0
        )
        assert written == expected
        assert set(written.values()) == {1}


def lanes_of(topology: Topology) -> tuple[int, int]:
    """Canonical lanes, or one per rank; and the ranks of the group."""
    ranks = topology.groups[0].world_size
    return topology.lanes or ranks, ranks


def picked(keys: LocalRange, ranges: Ranges, row: int) -> list[int]:
    """Local indices that one row meets."""
    index = np.arange(keys.start, keys.end) if keys.picked is None else keys.start + keys.picked
    first, end = int(ranges.first[row]), int(ranges.end[row])
    assert end <= len(index)
    return index[first:end].tolist() if first < end else []


@given(topologies(), request_lengths)
def test_a_copied_row_sees_each_visible_key_on_one_rank(
    topology: Topology, lengths: list[tuple[int, int]]
) -> None:
    """And there in the lane of the key, which the plan says holds something."""
    batch = make_batch(topology, lengths)
    steps, groups = steps_of(topology, batch), groups_of(topology, batch)
    lanes, ranks = lanes_of(topology)
    run, rule = topology.interleave_size, topology.groups[0].visibility
    for rank, (step, group) in enumerate(zip(steps, groups, strict=True)):
        place = topology.group_position(0, rank)
        stored = [t for t in range(200) if (t // run) % ranks == place]
        met: dict[int, list[tuple[int, int]]] = {row: [] for row in range(step.num_copy)}
        for part in group.copy_parts:
            for row in range(part.start, part.end):
                for view in part.views:
                    lane = place + view.lane * ranks
                    for index in picked(view.keys, view.ranges, row - part.start):
                        met[row].append((lane, stored[index]))
        for row in range(step.num_copy):
            seen = seen_by(rule, int(step.positions[row]))
            lane_of = {t: (t // run) % lanes for t in seen}
            expected = [(lane_of[t], t) for t in seen if lane_of[t] % ranks == place]
            assert sorted(met[row]) == sorted(expected)
            visible = group.copy_visible[:, row].tolist()
            assert visible == [lane in lane_of.values() for lane in range(lanes)]


Tag = tuple[int, int]


def sent_tags(
    topology: Topology, batch: GlobalBatch, rows: ClassStep, place: int, index: int
) -> list[list[Tag]]:
    """(request, position) of what the rank at a place reads of each piece of a chunk."""
    _, ranks = lanes_of(topology)
    found = []
    for piece, keys in zip(
        rows.plan.chunks[index].pieces, rows.key_context[index].sends, strict=True
    ):
        cached = batch.requests[piece.request].num_computed_tokens
        stored = [t for t in range(cached) if (t // topology.interleave_size) % ranks == place]
        found.append([(piece.request, t) for t in stored[keys.start : keys.end]])
    return found


def met_keys(
    rows: ClassStep, shards: list[list[list[list[Tag]]]], place: int
) -> dict[int, list[tuple[int, int]]]:
    """By row, (part, position) of every cached key that it meets; `shards` by rank and chunk."""
    met: dict[int, list[tuple[int, int]]] = {}
    for index, chunk in enumerate(rows.key_context):
        padded = []
        for shard in shards:
            tags = [tag for piece in shard[index] for tag in piece]
            assert len(tags) <= chunk.padded_local_rows
            padded.append(tags + [(-1, -1)] * (chunk.padded_local_rows - len(tags)))
        for number, piece in enumerate(chunk.pieces):
            for part_number, part in enumerate(piece.parts):
                came = {
                    "local": shards[place][index][number],
                    "gather_kv": [tag for shard in padded for tag in shard],
                    "ring_kv": padded[part_number % len(padded)],
                }[rows.plan.context]
                keys = np.arange(len(came))[part.index]
                for ranges in part.ranges:
                    for row in range(piece.start, piece.end):
                        start = int(ranges.first[row - piece.start])
                        for key in keys[start : int(ranges.end[row - piece.start])]:
                            request, position = came[key]
                            assert request == piece.request
                            met.setdefault(row, []).append((part_number, position))
    return met


@given(topologies(), request_lengths)
def test_context_and_self_part_make_up_what_a_distributed_row_sees(
    topology: Topology, lengths: list[tuple[int, int]]
) -> None:
    """Where keys travel: parts hold each visible cached key of a row once, each in its own part."""
    batch = make_batch(topology, lengths)
    steps = steps_of(topology, batch)
    groups = [localize_group(step, topology, 0) for step in steps]
    run, rule = topology.interleave_size, topology.groups[0].visibility
    for copy in store_copies(topology):
        for number, first in enumerate(groups[copy[0]].classes):
            if not first.key_context:
                continue
            num_parts = topology.lanes or 1
            if first.plan.context == "ring_kv":
                num_parts = len(copy)
            members = [groups[rank].classes[number] for rank in copy]
            shards = [
                [sent_tags(topology, batch, rows, place, i) for i in range(len(rows.key_context))]
                for place, rows in enumerate(members)
            ]
            for place, (rank, rows) in enumerate(zip(copy, members, strict=True)):
                met = met_keys(rows, shards, place)
                for segment in rows.segments:
                    cached = batch.requests[segment.request].num_computed_tokens
                    for row in range(segment.start, segment.end):
                        seen = seen_by(rule, int(steps[rank].positions[rows.start + row]))
                        expected = [((t // run) % num_parts, t) for t in seen if t < cached]
                        assert sorted(met.get(row, [])) == sorted(expected)


def test_sequences_of_one_step_may_start_on_different_ranks() -> None:
    """Interleave 2 on 4 ranks; a chain that starts at rank u is dealt from u on."""
    topology = make_topology((1, 4, 4), interleave=2, row_policy=by_length)
    batch = make_batch(topology, [(2, 1), (0, 1), (5, 1), (3, 9)])
    starts = (1, 0, 3, 2)
    batch = msgspec.structs.replace(
        batch,
        requests=tuple(
            msgspec.structs.replace(
                request, start_rank=start, layout_fingerprint=topology.fingerprint(start)
            )
            for request, start in zip(batch.requests, starts, strict=True)
        ),
    )
    steps = steps_of(topology, batch)

    def owner(start: int, position: int) -> int:
        return (position // 2 + start) % 4

    for place, rank in enumerate(topology.mesh.groups("dcp")[0]):
        group = localize_group(steps[rank], topology, 0)
        for row, (start, position) in enumerate(zip(starts, (2, 0, 5), strict=False)):
            seen = [sum(owner(start, t) == r for t in range(position + 1)) for r in range(4)]
            views = group.copy_parts[row].views
            assert sum(int(view.ranges.end[0]) for view in views) == seen[place]
            assert group.copy_visible[:, row].tolist() == [count > 0 for count in seen]
            assert (group.slot_mapping[row] >= 0) == (owner(start, position) == place)
    written = sum(localize_group(step, topology, 0).coverage for step in steps) % 2**64
    assert (written,) == expected_coverage(steps[0].plan.batch, topology)


def test_one_step_followed_on_every_rank() -> None:
    """TP2 x PCP2, DCP 4, interleave 2: A prefills 8 rows while B decodes at position 11."""
    topology = make_topology((2, 2, 4), interleave=2, return_exchange="ag_ar", row_policy=by_length)
    batch = make_batch(topology, [(0, 8), (11, 1)])
    tables = [request.block_tables[0] for request in batch.requests]
    assert [len(table) for table in tables] == [1, 1]
    a, b = tables[0][0] * 4, tables[1][0] * 4
    slots = {
        0: ([-1], [a, a + 1, -1, -1, -1, -1, -1, -1]),
        1: ([-1], [-1, -1, -1, -1, -1, -1, a, a + 1]),
        2: ([b + 3], [-1, -1, -1, -1, a, a + 1, -1, -1]),
        3: ([-1], [-1, -1, a, a + 1, -1, -1, -1, -1]),
    }
    # R0 R2 R1 R3 are DCP positions 0..3; gathered rows are A 0 1 6 7 | 2 3 4 5.
    gathered = [0, 1, 6, 7, 2, 3, 4, 5]
    for rank, step in enumerate(steps_of(topology, batch)):
        group = localize_group(step, topology, 0)
        copied, distributed = slots[rank]
        assert group.slot_mapping[:1].tolist() == copied
        assert group.slot_mapping[1:].tolist() == distributed
        assert step.positions.tolist() == [11, *gathered[4 * step.pcp_rank :][:4]]
        (view,) = group.copy_parts[0].views
        assert view.ranges.end.tolist() == [[4, 2, 4, 2][rank]]
