"""Every row, slot and key of a plan reaches exactly the ranks that it should.

The expectations use their own copy of the placement formulas.
"""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
from hypothesis import given

from heddle.step.batch import GlobalBatch
from heddle.step.localize import RankStep, localize
from heddle.step.plan import plan
from heddle.step.topology import Topology
from tests.support.batches import make_batch, make_topology, request_lengths, topologies


def owner_and_slot(topology: Topology, table: tuple[int, ...], position: int) -> tuple[int, int]:
    """DCP position that stores a token, and its slot there, counted the long way."""
    ranks, run, block = topology.mesh.dcp_size, topology.interleave_size, topology.block_size
    owner, local = 0, [0] * ranks
    for t in range(position + 1):
        owner = (t // run) % ranks
        if t < position:
            local[owner] += 1
    index = local[owner]
    return owner, table[index // block] * block + index % block


def steps_of(topology: Topology, batch: GlobalBatch) -> list[RankStep]:
    step_plan = plan(batch, topology)
    return [localize(step_plan, topology, rank) for rank in range(topology.mesh.world_size)]


@given(topologies(), request_lengths)
def test_each_new_position_is_written_once_per_store_copy(
    topology: Topology, lengths: list[tuple[int, int]]
) -> None:
    batch = make_batch(topology, lengths)
    steps = steps_of(topology, batch)
    expected = Counter(
        owner_and_slot(topology, request.block_table, request.num_computed_tokens + i)
        for request in batch.requests
        for i in range(len(request.token_ids))
    )
    for group in topology.mesh.groups("dcp"):
        written = Counter(
            (place, int(slot))
            for place, rank in enumerate(group)
            for slot in steps[rank].slot_mapping
            if slot >= 0
        )
        assert written == expected
        assert set(written.values()) == {1}


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
    copied = sum(
        len(request.token_ids)
        for request in batch.requests
        if len(request.token_ids) < 2 * topology.mesh.pcp_size
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


@given(topologies(), request_lengths)
def test_a_copied_row_sees_each_key_up_to_itself_on_one_rank(
    topology: Topology, lengths: list[tuple[int, int]]
) -> None:
    batch = make_batch(topology, lengths)
    steps = steps_of(topology, batch)
    for group in topology.mesh.groups("dcp"):
        parts = [steps[rank].copy_parts for rank in group]
        for index, part in enumerate(parts[0]):
            totals = sum(parts[place][index].visible for place in range(len(group)))
            assert (totals == steps[group[0]].positions[part.start : part.end] + 1).all()
    for step in steps:
        for part in step.copy_parts:
            for rank in range(topology.mesh.dcp_size):
                owned = [
                    any(
                        (t // topology.interleave_size) % topology.mesh.dcp_size == rank
                        for t in range(position + 1)
                    )
                    for position in step.positions[part.start : part.end]
                ]
                assert step.copy_visible[rank, part.start : part.end].tolist() == owned


@given(topologies(), request_lengths)
def test_self_segments_see_new_keys_up_to_their_own_position(
    topology: Topology, lengths: list[tuple[int, int]]
) -> None:
    batch = make_batch(topology, lengths)
    for step in steps_of(topology, batch):
        for part in step.distributed_parts:
            cached = batch.requests[part.request].num_computed_tokens
            for segment in part.segments:
                for offset, row in enumerate(range(segment.start, segment.end)):
                    position = step.positions[step.num_copy + row]
                    assert segment.first_visible + offset == position - cached + 1


@given(topologies(), request_lengths)
def test_gathered_context_pieces_are_the_positions_of_their_request(
    topology: Topology, lengths: list[tuple[int, int]]
) -> None:
    """Simulate the gather with (request, position) tags and read each piece back."""
    batch = make_batch(topology, lengths)
    steps = steps_of(topology, batch)
    looped = 0
    for group in topology.mesh.groups("dcp"):
        chunks = steps[group[0]].plan.context_chunks
        for number, chunk in enumerate(chunks):
            sent: list[tuple[int, int]] = []
            for place, rank in enumerate(group):
                mine: list[tuple[int, int]] = []
                for piece, keys in zip(
                    chunk.pieces, steps[rank].key_context[number].sends, strict=True
                ):
                    request = batch.requests[piece.request]
                    mine += [
                        (piece.request, t)
                        for t in range(request.num_computed_tokens)
                        if (t // topology.interleave_size) % len(group) == place
                    ][keys.start : keys.end]
                    # The slice above counts positions of this request only.
                pad = chunk.padded_local_rows - len(mine)
                assert pad >= 0
                sent += mine + [(-1, -1)] * pad
            for rank in group:
                for piece, local in zip(
                    chunk.pieces, steps[rank].key_context[number].pieces, strict=True
                ):
                    got = sorted(sent[index] for index in local.gathered)
                    assert got == [(piece.request, t) for t in range(piece.start, piece.end)]
                    looped += 1
    has_context = any(cached and new >= 2 * topology.mesh.pcp_size for cached, new in lengths)
    exchange = steps[0].plan.context_exchange
    assert (looped > 0) == (has_context and exchange in ("gather_kv", "local"))


def test_sequences_of_one_step_may_start_on_different_ranks() -> None:
    """Interleave 2 on 4 ranks; a chain that starts at rank u is dealt from u on."""
    topology = make_topology((1, 4, 4), interleave=2)
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
        step = steps[rank]
        for row, (start, position) in enumerate(zip(starts, (2, 0, 5), strict=False)):
            seen = [sum(owner(start, t) == r for t in range(position + 1)) for r in range(4)]
            assert step.copy_parts[row].visible.tolist() == [seen[place]]
            assert step.copy_visible[:, row].tolist() == [count > 0 for count in seen]
            assert (step.slot_mapping[row] >= 0) == (owner(start, position) == place)
    written = sum(step.coverage for step in steps) % 2**64
    assert written == steps[0].plan.coverage


def test_one_step_followed_on_every_rank() -> None:
    """TP2 x PCP2, DCP 4, interleave 2: A prefills 8 rows while B decodes at position 11."""
    topology = make_topology((2, 2, 4), interleave=2, copy_exchange="ag_ar")
    batch = make_batch(topology, [(0, 8), (11, 1)])
    tables = [request.block_table for request in batch.requests]
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
        copied, distributed = slots[rank]
        assert step.slot_mapping[:1].tolist() == copied
        assert step.slot_mapping[1:].tolist() == distributed
        assert step.positions.tolist() == [11, *gathered[4 * step.pcp_rank :][:4]]
        assert step.copy_parts[0].visible.tolist() == [[4, 2, 4, 2][rank]]
