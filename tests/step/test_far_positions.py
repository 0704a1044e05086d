"""Positions and slots beyond 2**31, placed by arithmetic alone: what numpy computes in 64 bits is
what Python's integers give, and no tensor of that size is made.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.attention.row_codec import PlainRows
from heddle.attention.storage import KVStore, SlotWrite
from heddle.config.visibility import Visibility
from heddle.layout.cache_need import blocks_needed, longest_sequence
from heddle.layout.kv import KVLayout
from heddle.layout.rows import RowClass, RowRequest
from heddle.step.batch import GlobalBatch, ScheduledRequest
from heddle.step.context import ContextSpans, plan_context_chunks
from heddle.step.local_copy import CopiedRows
from heddle.step.localize import localize
from heddle.step.packed import pack_table
from heddle.step.placement import Placed
from heddle.step.plan import plan
from heddle.step.slots import row_slots
from heddle.step.topology import Topology
from heddle.step.views import LocalRange, visible_ranges
from tests.support.batches import make_batch, make_topology

BLOCK = 1 << 30
"""Tokens of a page here, so that a few pages reach far."""
positions = st.integers((1 << 31) - 40, 1 << 52)
sizes = st.sampled_from([(1, 1), (2, 4), (3, 8), (8, 16), (16, 1)])
"""(ranks, interleave)."""


def owner_and_index(position: int, ranks: int, run: int) -> tuple[int, int]:
    return position // run % ranks, position // (ranks * run) * run + position % run


@given(st.lists(positions, min_size=1, max_size=8), sizes, st.integers(4, 30), st.data())
@settings(max_examples=25)
def test_places_of_far_tokens_are_those_of_whole_numbers(
    found: list[int], size: tuple[int, int], bits: int, data: st.DataObject
) -> None:
    ranks, run = size
    layout = KVLayout(ranks, run, 1 << bits)
    rank = data.draw(st.integers(0, ranks - 1))
    pages = [data.draw(st.integers(1, 1 << 32)) for _ in found]
    places = [owner_and_index(t, ranks, run) for t in found]
    array = np.array(found, dtype=np.int64)
    assert layout.owner(array).tolist() == [owner for owner, _ in places]
    assert layout.local_index(array).tolist() == [index for _, index in places]
    assert layout.slots_in(np.array(pages, dtype=np.int64), array, rank).tolist() == [
        page * (1 << bits) + index % (1 << bits) if owner == rank else -1
        for page, (owner, index) in zip(pages, places, strict=True)
    ]
    for t, bound in zip(found, layout.visible_len(array, rank).tolist(), strict=True):
        whole, open_round = divmod(t + 1, ranks * run)
        assert bound == whole * run + min(max(open_round - rank * run, 0), run)
        if owner_and_index(t, ranks, run)[0] == rank:
            assert layout.global_position(bound - 1, rank) == t


@given(
    st.lists(positions, min_size=1, max_size=8), st.integers(1, 1 << 40), st.integers(0, 1 << 35)
)
def test_far_rows_see_the_keys_of_their_rule(found: list[int], size: int, first: int) -> None:
    array = np.array(found, dtype=np.int64)
    main, leading = visible_ranges(Visibility("window", size, first or 1), array)
    starts = [max(t + 1 - size, 0) for t in found]
    assert (main.first.tolist(), main.end.tolist()) == (starts, [t + 1 for t in found])
    assert leading.end.tolist() == [min(start, first or 1) for start in starts]
    (chunk,) = visible_ranges(Visibility("chunk", size), array)
    assert chunk.first.tolist() == [t - t % size for t in found]


def far_batch(topology: Topology, cached: int, new: int) -> GlobalBatch:
    """One request of `cached` tokens whose pages have ids beyond 2**20."""
    batch = make_batch(topology, [(cached, new)])
    request = batch.requests[0]
    table = tuple((1 << 20) + 7 * block for block in request.block_tables[0])
    request = msgspec.structs.replace(request, packed_tables=(pack_table(table),))
    return msgspec.structs.replace(batch, requests=(request,))


def all_copied(requests: Sequence[ScheduledRequest], _: Topology) -> Placed:
    """Every row is on every rank: rows that are dealt out would list the positions they meet."""
    return Placed(tuple(RowRequest(len(r.token_ids), RowClass.COPY) for r in requests), ())


@given(st.integers(1 << 31, 1 << 34), sizes, st.integers(1, 3))
@settings(max_examples=25)
def test_a_far_row_of_a_step_is_stored_and_read_where_it_belongs(
    cached: int, size: tuple[int, int], new: int
) -> None:
    ranks, run = size
    topology = make_topology(
        (1, ranks, ranks), interleave=run, block_size=BLOCK, row_policy=all_copied
    )
    batch = far_batch(topology, cached, new)
    table = batch.requests[0].block_tables[0]
    step_plan = plan(batch, topology)
    stored = set()
    for rank in range(ranks):
        step = localize(step_plan, topology, rank)
        assert step.positions.tolist() == list(range(cached, cached + new))
        place = topology.group_position(0, rank)
        for row, slot in enumerate(row_slots(step, topology, 0, place).tolist()):
            owner, index = owner_and_index(cached + row, ranks, run)
            if owner == place:
                assert slot == table[index // BLOCK] * BLOCK + index % BLOCK > 1 << 31
                stored.add(row)
            else:
                assert slot == -1
        (part,) = CopiedRows(step, topology, 0).parts()
        (view,) = part.views
        ends = [KVLayout(ranks, run, BLOCK).visible_len(cached + i, place) for i in range(new)]
        assert (view.keys.start, view.keys.end) == (0, ends[-1])
        assert view.ranges.end.tolist() == ends
    assert stored == set(range(new))


@given(st.integers(0, 1 << 36), st.integers(1, 1 << 20), st.integers(1, 40))
def test_slots_of_far_blocks_are_whole_numbers(start: int, length: int, pages: int) -> None:
    """No tensor is behind this store: it has no layers."""
    store = KVStore(
        tensor_of_layer={},
        num_blocks=1 << 40,
        block_size=BLOCK,
        num_heads=1,
        codec=PlainRows(1, torch.float32),
        device=torch.device("cpu"),
    )
    start %= pages * BLOCK - length
    table = (1 << 20) + np.arange(pages, dtype=np.int64)
    found = store.locate(LocalRange(table, start, start + length))
    assert found.index is None
    assert (found.start, found.end) == ((BLOCK << 20) + start, (BLOCK << 20) + start + length)
    picked = np.array([0, length - 1], dtype=np.int64)
    index = store.locate(LocalRange(table[::-1].copy(), start, start + length, picked)).index
    assert index is not None
    assert index.tolist() == [
        ((1 << 20) + pages - 1 - (start + i) // BLOCK) * BLOCK + (start + i) % BLOCK
        for i in (0, length - 1)
    ]
    write = SlotWrite.of(np.array([-1, 1 << 50], dtype=np.int64), 1 << 51)
    assert write.slots.tolist() == [1 << 50]


@given(st.integers(1, 1 << 45), st.integers(1, 1 << 40), sizes)
def test_far_context_is_cut_into_pieces_without_gaps(
    end: int, workspace: int, size: tuple[int, int]
) -> None:
    layout = KVLayout(*size, BLOCK)
    workspace = max(workspace, end // 20)  # few pieces
    chunks = plan_context_chunks(ContextSpans.of(layout, [(0, 0, end, 0)]), workspace)
    bounds = [(piece.start, piece.end) for chunk in chunks for piece in chunk.pieces]
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
    assert bounds[-1][1] == end
    for chunk in chunks:
        assert layout.world_size * chunk.padded_local_rows <= max(workspace, layout.round_size)


@given(st.integers(1, 1 << 50), st.integers(1, 1 << 24), st.integers(1, 1 << 20))
def test_blocks_of_far_sequences_are_whole_numbers(tokens: int, unit: int, rows: int) -> None:
    full, window = Visibility(), Visibility("window", 1 << 33)
    assert blocks_needed(full, unit, tokens, rows) == (tokens + unit - 1) // unit
    assert blocks_needed(window, unit, tokens, rows) <= ((1 << 33) + rows) // unit + 2
    blocks = (tokens + unit - 1) // unit
    assert longest_sequence([(full, unit)], blocks, rows) == blocks * unit
