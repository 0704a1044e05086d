"""Laws R1 to R6: who computes a row."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.layout.kv import KVLayout
from heddle.layout.rows import (
    RowClass,
    RowLayout,
    RowRequest,
    Segment,
    classify,
    create_row_layout,
    cut_points,
)

pcp_sizes = st.integers(1, 5)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[RowRequest], int]:
    pcp_size = draw(pcp_sizes)
    request = st.builds(
        RowRequest,
        num_rows=st.one_of(
            st.sampled_from([0, 1, max(0, pcp_size - 1), 2 * pcp_size - 1, 2 * pcp_size + 1]),
            st.integers(0, 40),
        ),
        row_class=st.sampled_from(RowClass),
        owner=st.integers(0, pcp_size - 1),
    )
    return draw(st.lists(request, max_size=7)), pcp_size


def rows_of(requests: list[RowRequest]) -> list[tuple[int, int]]:
    """(request, offset) of each global row."""
    return [(b, i) for b, request in enumerate(requests) for i in range(request.num_rows)]


def split_rows(num_rows: int, rank: int, pcp_size: int) -> list[int]:
    """Offsets that a rank computes of a SPLIT request, row by row; an oracle by definition."""
    chunks = 2 * pcp_size

    def chunk_of(row: int) -> int:
        return next(i for i in range(chunks) if row < num_rows * (i + 1) // chunks)

    return [row for row in range(num_rows) if chunk_of(row) in (rank, chunks - 1 - rank)]


@given(st.integers(0, 200), pcp_sizes)
def test_segments_of_a_split_request_tile_it_in_order(num_rows: int, pcp_size: int) -> None:
    layout = create_row_layout([RowRequest(num_rows, RowClass.SPLIT)], pcp_size)
    parts = [layout.segments(rank) for rank in range(pcp_size)]
    assert all(len(part) == 2 for part in parts)
    ordered = [part[0] for part in parts] + [part[1] for part in reversed(parts)]
    assert ordered[0].start == 0
    assert ordered[-1].end == num_rows
    assert all(a.end == b.start for a, b in itertools.pairwise(ordered))
    for rank, part in enumerate(parts):
        assert [row for _, a, b, _ in part for row in range(a, b)] == split_rows(
            num_rows, rank, pcp_size
        )


@given(st.integers(1, 500), pcp_sizes)
def test_split_shares_are_even_and_the_last_row_is_on_rank_zero(
    num_rows: int, pcp_size: int
) -> None:
    cuts = cut_points(num_rows, pcp_size)
    chunks = np.diff(cuts)
    assert chunks.max() - chunks.min() <= 1
    layout = create_row_layout([RowRequest(num_rows, RowClass.SPLIT)], pcp_size)
    shares = [sum(b - a for _, a, b, _ in layout.segments(rank)) for rank in range(pcp_size)]
    assert max(shares) - min(shares) <= 2
    assert layout.segments(0)[-1].end == num_rows
    assert layout.segments(0)[-1].start < num_rows


@given(batches())
def test_restore_after_gather_is_the_identity(batch: tuple[list[RowRequest], int]) -> None:
    requests, pcp_size = batch
    layout = create_row_layout(requests, pcp_size)
    tags = np.array(rows_of(requests), dtype=np.int64).reshape(-1, 2)
    assert layout.num_rows == len(tags)
    gathered = tags[layout.gather] if len(tags) else tags
    assert gathered[layout.restore].tolist() == tags.tolist()


@given(batches())
def test_each_row_has_one_canonical_copy_and_pads_have_none(
    batch: tuple[list[RowRequest], int],
) -> None:
    requests, pcp_size = batch
    layout = create_row_layout(requests, pcp_size)
    assert sorted(layout.gather[layout.canon].tolist()) == list(range(layout.num_rows))
    assert not (layout.canon & ~layout.valid).any()
    assert layout.gather[~layout.valid].tolist() == [0] * int((~layout.valid).sum())
    rank_of = layout.restore // max(layout.num_local_rows, 1)
    for row, (request, _) in enumerate(rows_of(requests)):
        if requests[request].row_class is RowClass.COPY:
            assert rank_of[row] == 0
        elif requests[request].row_class is RowClass.WHOLE:
            assert rank_of[row] == requests[request].owner


@given(batches())
def test_a_rank_computes_what_its_classes_say(batch: tuple[list[RowRequest], int]) -> None:
    requests, pcp_size = batch
    layout = create_row_layout(requests, pcp_size)
    starts = np.concatenate([[0], np.cumsum([r.num_rows for r in requests])])
    assert layout.request_starts.tolist() == starts.tolist()
    for rank in range(pcp_size):
        expected: list[int] = []
        for row_class in (RowClass.COPY, RowClass.WHOLE, RowClass.SPLIT):
            for index, request in enumerate(requests):
                if request.row_class is not row_class:
                    continue
                offsets = list(range(request.num_rows))
                if row_class is RowClass.WHOLE and request.owner != rank:
                    offsets = []
                if row_class is RowClass.SPLIT:
                    offsets = split_rows(request.num_rows, rank, pcp_size)
                expected += [int(starts[index]) + offset for offset in offsets]
        local = layout.local_rows(rank)
        assert len(local) == layout.num_local_rows == layout.num_copy + layout.num_distributed
        valid = layout.valid.reshape(pcp_size, -1)[rank]
        assert local[valid].tolist() == expected
        assert (local[~valid] == 0).all()
        spread = [
            (row + i - start, int(starts[b]) + i)
            for b, start, end, row in layout.segments(rank)
            for i in range(start, end)
        ]
        assert spread == list(zip(np.flatnonzero(valid).tolist(), expected, strict=True))


@given(batches())
def test_no_rank_pads_more_than_the_largest_needs(batch: tuple[list[RowRequest], int]) -> None:
    requests, pcp_size = batch
    layout = create_row_layout(requests, pcp_size)
    copies = sum(r.num_rows for r in requests if r.row_class is RowClass.COPY)
    assert layout.num_copy == copies
    valid = layout.valid.reshape(pcp_size, -1)
    for row_class in RowClass:
        start, end = layout.class_rows(row_class)
        assert end - start == valid[:, start:end].sum(axis=1).max(initial=0)
        for rank in range(pcp_size):
            held = sum(part.num_rows for part in layout.class_segments(rank, row_class))
            assert valid[rank, start:end].tolist() == [i < held for i in range(end - start)]


@given(batches())
def test_distributed_order_lists_distributed_rows_ascending(
    batch: tuple[list[RowRequest], int],
) -> None:
    requests, pcp_size = batch
    layout = create_row_layout(requests, pcp_size)
    gathered = layout.gather.reshape(pcp_size, -1)[:, layout.num_copy :].ravel()
    expected = [
        row
        for row, (request, _) in enumerate(rows_of(requests))
        if requests[request].row_class is not RowClass.COPY
    ]
    assert len(gathered) == pcp_size * layout.num_distributed
    assert gathered[layout.distributed_order].tolist() == expected
    valid = layout.valid.reshape(pcp_size, -1)[:, layout.num_copy :].ravel()
    assert valid[layout.distributed_order].all()


@given(batches(), st.integers(1, 3), st.integers(1, 3), st.integers(0, 20))
def test_each_position_is_written_once_per_store_copy(
    batch: tuple[list[RowRequest], int], interleave: int, k: int, context: int
) -> None:
    requests, pcp_size = batch
    rows = create_row_layout(requests, pcp_size)
    kv = KVLayout(pcp_size * k, interleave, 2 * interleave)
    gathered = rows.gather.reshape(pcp_size, -1)[:, rows.num_copy :].ravel()
    distributed = gathered[rows.distributed_order].tolist()
    tags = rows_of(requests)
    writes: Counter[tuple[int, int]] = Counter()
    for position in range(kv.world_size):
        own_copies = rows.local_rows(position % pcp_size)[: rows.num_copy].tolist()
        seen = own_copies + distributed
        assert sorted(seen) == list(range(rows.num_rows))  # each row once, at write time
        for row in seen:
            request, offset = tags[row]
            if kv.owner(context + offset) == position:
                writes[request, offset] += 1
    assert writes == Counter(tags)


@given(batches(), st.randoms())
def test_request_order_changes_placement_only(
    batch: tuple[list[RowRequest], int], random: st.DataObject
) -> None:
    requests, pcp_size = batch
    order = list(range(len(requests)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = [requests[index] for index in order]

    def computed(layout: RowLayout, rank: int, names: list[int]) -> set[tuple[int, int]]:
        return {
            (names[b], row)
            for b, start, end, _ in layout.segments(rank)
            for row in range(start, end)
        }

    plain, mixed = (create_row_layout(batch, pcp_size) for batch in (requests, shuffled))
    for rank in range(pcp_size):
        assert computed(plain, rank, sorted(order)) == computed(mixed, rank, order)


def test_index_arrays_table() -> None:
    split, copied = RowRequest(8, RowClass.SPLIT), RowRequest(1, RowClass.COPY)
    layout = create_row_layout([split, copied], pcp_size=2)
    assert (layout.num_rows, layout.num_copy, layout.num_distributed) == (9, 1, 4)
    assert layout.gather.tolist() == [8, 0, 1, 6, 7, 8, 2, 3, 4, 5]
    assert layout.canon.tolist() == [True] * 5 + [False] + [True] * 4
    assert layout.restore.tolist() == [1, 2, 6, 7, 8, 9, 3, 4, 0]
    assert layout.valid.all()
    assert layout.segments(0) == (Segment(1, 0, 1, 0), Segment(0, 0, 2, 1), Segment(0, 6, 8, 3))
    assert layout.segments(1) == (Segment(1, 0, 1, 0), Segment(0, 2, 4, 1), Segment(0, 4, 6, 3))
    assert layout.distributed_order.tolist() == [0, 1, 4, 5, 6, 7, 2, 3]


def test_a_shorter_rank_is_padded_with_row_zero() -> None:
    split, copied = RowRequest(7, RowClass.SPLIT), RowRequest(1, RowClass.COPY)
    layout = create_row_layout([split, copied], pcp_size=2)
    assert layout.gather.tolist() == [7, 0, 5, 6, 0, 7, 1, 2, 3, 4]
    assert np.flatnonzero(~layout.valid).tolist() == [4]


def test_tiny_requests_between_do_not_shift_others() -> None:
    decode, prompt = RowRequest(1, RowClass.COPY), RowRequest(4, RowClass.SPLIT)
    layout = create_row_layout([decode, prompt, decode], pcp_size=2)
    assert layout.gather.tolist() == [0, 5, 1, 4, 0, 5, 2, 3]
    assert layout.restore.tolist() == [0, 2, 6, 7, 3, 1]


@pytest.mark.parametrize(
    ("pcp_size", "num_rows", "cuts", "rows"),
    [
        (2, 8, (0, 2, 4, 6, 8), [[0, 1, 6, 7], [2, 3, 4, 5]]),
        (2, 7, (0, 1, 3, 5, 7), [[0, 5, 6], [1, 2, 3, 4]]),
        (3, 10, (0, 1, 3, 5, 6, 8, 10), [[0, 8, 9], [1, 2, 6, 7], [3, 4, 5]]),
        (2, 3, (0, 0, 1, 2, 3), [[2], [0, 1]]),
        (3, 8, (0, 1, 2, 4, 5, 6, 8), [[0, 6, 7], [1, 5], [2, 3, 4]]),
    ],
)
def test_cut_table(
    pcp_size: int, num_rows: int, cuts: tuple[int, ...], rows: list[list[int]]
) -> None:
    assert cut_points(num_rows, pcp_size) == cuts
    layout = create_row_layout([RowRequest(num_rows, RowClass.SPLIT)], pcp_size)
    found = [
        [row for _, start, end, _ in layout.segments(rank) for row in range(start, end)]
        for rank in range(pcp_size)
    ]
    assert found == rows


@pytest.mark.parametrize(
    ("pcp_size", "num_rows", "context", "imbalance"),
    [(2, 7, 0, 1.000), (4, 61, 0, 1.032), (8, 20, 0, 1.524), (8, 20, 1000, 1.203)],
)
def test_causal_work_is_balanced_as_derived(
    pcp_size: int, num_rows: int, context: int, imbalance: float
) -> None:
    layout = create_row_layout([RowRequest(num_rows, RowClass.SPLIT)], pcp_size)
    work = [
        sum(
            context + row + 1
            for _, start, end, _ in layout.segments(rank)
            for row in range(start, end)
        )
        for rank in range(pcp_size)
    ]
    assert round(max(work) * pcp_size / sum(work), 3) == imbalance


@pytest.mark.parametrize("pcp_size", [1, 2, 3])
def test_small_requests_are_copied_and_others_split(pcp_size: int) -> None:
    found = [classify(q, pcp_size) for q in range(2 * pcp_size + 2)]
    assert found == [RowClass.COPY] * (2 * pcp_size) + [RowClass.SPLIT] * 2


def test_an_empty_batch_has_empty_arrays() -> None:
    layout = create_row_layout([], pcp_size=3)
    assert layout.num_rows == layout.num_local_rows == 0
    assert [len(a) for a in (layout.gather, layout.restore, layout.distributed_order)] == [0, 0, 0]
    assert layout.request_starts.tolist() == [0]


def test_arrays_are_read_only() -> None:
    layout = create_row_layout([RowRequest(3, RowClass.SPLIT)], pcp_size=1)
    with pytest.raises(ValueError, match="read-only"):
        layout.gather[0] = 1


def test_misuse_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="pcp_size=0; must be at least 1"):
        create_row_layout([], pcp_size=0)
    with pytest.raises(ValueError, match="request 0: num_rows=-1; must be at least 0"):
        create_row_layout([RowRequest(-1, RowClass.COPY)], pcp_size=1)
    with pytest.raises(ValueError, match=r"request 0: owner=2; must be in \[0, 2\)"):
        create_row_layout([RowRequest(1, RowClass.WHOLE, owner=2)], pcp_size=2)
    with pytest.raises(ValueError, match=r"pcp_rank=1; must be in \[0, 1\)"):
        create_row_layout([], pcp_size=1).segments(1)
