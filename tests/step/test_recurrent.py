"""Runs and segments of a step, the same on every rank; calls follow from rows alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.config.model import RecurrentConfig
from heddle.layout.recurrent_heads import RecurrentLayout
from heddle.layout.rows import RowClass, RowLayout, RowRequest, create_row_layout
from heddle.step.batch import StateUse
from heddle.step.recurrent import (
    DirectRun,
    OwnSegment,
    SegmentPlace,
    create_recurrent_step,
    num_scanned_segments,
    recurrent_collectives,
)


@st.composite
def row_layouts(draw: st.DrawFn) -> RowLayout:
    pcp = draw(st.integers(1, 5))
    request = st.builds(
        RowRequest, st.integers(0, 13), st.sampled_from(RowClass), st.integers(0, pcp - 1)
    )
    return create_row_layout(draw(st.lists(request, min_size=1, max_size=5)), pcp)


def uses(rows: RowLayout) -> list[StateUse]:
    return [StateUse(source=i, targets=(100 + i,)) for i in range(len(rows.classes))]


@given(rows=row_layouts())
def test_every_row_is_in_one_run_or_segment_of_its_rank(rows: RowLayout) -> None:
    for rank in range(rows.pcp_size):
        step = create_recurrent_step(rows, uses(rows), rank)
        covered = [row for run in step.direct for row in range(run.start, run.end)]
        covered += [row for own in step.own for row in range(own.start, own.end)]
        valid = rows.valid.reshape(rows.pcp_size, -1)[rank]
        assert sorted(covered) == [row for row in range(rows.num_local_rows) if valid[row]]


@given(rows=row_layouts())
def test_segments_of_a_request_tile_its_rows_in_order(rows: RowLayout) -> None:
    steps = [create_recurrent_step(rows, uses(rows), rank) for rank in range(rows.pcp_size)]
    assert len({step.scanned for step in steps}) == 1
    rank_rows = rows.gather.reshape(rows.pcp_size, -1)
    for run, scanned in enumerate(steps[0].scanned):
        request = scanned.target - 100
        assert scanned.source == request
        found = []
        for place, (rank, number, num_rows) in enumerate(scanned.segments):
            (own,) = [own for own in steps[rank].own if (own.run, own.place) == (run, place)]
            assert (own.number, own.end - own.start) == (number, num_rows)
            assert number < steps[0].num_segments
            found += rank_rows[rank, own.start : own.end].tolist()
        first, last = rows.request_starts[request : request + 2]
        assert found == list(range(first, last))


def test_a_split_request_beside_a_decode() -> None:
    rows = create_row_layout([RowRequest(7, RowClass.SPLIT), RowRequest(1, RowClass.COPY)], 2)
    use = [StateUse(source=3, targets=(4,)), StateUse(source=5, targets=(5,))]
    step = create_recurrent_step(rows, use, 1)
    assert step.direct == (DirectRun(0, 1, 5, (5,)),)
    (run,) = step.scanned
    assert (run.source, run.target) == (3, 4)
    # Chunks 0 1, 1 3, 3 5, 5 7 of ranks 0 1 1 0.
    assert run.segments == (
        SegmentPlace(0, 0, 1),
        SegmentPlace(1, 0, 2),
        SegmentPlace(1, 1, 2),
        SegmentPlace(0, 1, 2),
    )
    assert step.own == (OwnSegment(0, 1, 0, 1, 3), OwnSegment(0, 2, 1, 3, 5))
    assert (step.num_segments, step.num_local_rows) == (2, 5)


def test_one_rank_runs_everything_directly() -> None:
    rows = create_row_layout([RowRequest(7, RowClass.SPLIT), RowRequest(2, RowClass.WHOLE)], 1)
    use = [StateUse(source=0, targets=(4, 6)), StateUse(source=5, targets=(5,))]
    step = create_recurrent_step(rows, use, 0)
    assert sorted(step.direct, key=lambda run: run.source) == [
        DirectRun(2, 9, 0, (4, 6)),
        DirectRun(0, 2, 5, (5,)),
    ]
    assert (step.num_segments, step.scanned, step.own) == (0, (), ())


CONFIG = RecurrentConfig(
    method="gated_delta",
    num_heads=6,
    num_key_heads=2,
    key_dim=4,
    value_dim=3,
    conv_kernel=4,
    norm_groups=6,
)


def test_calls_of_a_layer() -> None:
    layout = RecurrentLayout(CONFIG, 2)
    split = create_row_layout([RowRequest(9, RowClass.SPLIT), RowRequest(1, RowClass.COPY)], 2)
    assert num_scanned_segments(split) == 2
    assert recurrent_collectives(split, layout, 1, "bfloat16") == (
        ("all_gather", "pcp", (2, 3, 2 * 4 + 3 * 3), "bfloat16"),
        ("all_gather", "pcp", (2, 3, 4 * 3 + 16), "float32"),
    )
    assert recurrent_collectives(split, layout, 1, "float64")[1][3] == "float64"
    copied = create_row_layout([RowRequest(1, RowClass.COPY)], 2)
    alone = create_row_layout([RowRequest(9, RowClass.SPLIT)], 1)
    for rows in (copied, alone):
        assert recurrent_collectives(rows, layout, 1, "bfloat16") == ()


def test_calls_without_convolution_and_with_a_norm_over_ranks() -> None:
    config = RecurrentConfig(
        method="lightning", num_heads=6, num_key_heads=6, key_dim=4, value_dim=4, norm_groups=1
    )
    rows = create_row_layout([RowRequest(3, RowClass.WHOLE, 1), RowRequest(1, RowClass.COPY)], 2)
    assert recurrent_collectives(rows, RecurrentLayout(config, 2), 0, "float32") == (
        ("all_gather", "pcp", (1, 3, 17), "float32"),
        ("all_reduce", "tp", (4, 1), "float32"),
    )


@pytest.mark.parametrize(
    ("row_class", "use", "message"),
    [
        (RowClass.COPY, None, "request 0 has no state slots"),
        (RowClass.COPY, StateUse(source=1, targets=()), "one slot or more"),
        (RowClass.COPY, StateUse(source=1, targets=(2, 0)), "none of them 0"),
        (RowClass.COPY, StateUse(source=1, targets=(1, 2, 3, 4)), "4 targets for 3 rows"),
        (RowClass.SPLIT, StateUse(source=1, targets=(1, 2)), "must be COPY"),
        (RowClass.WHOLE, StateUse(source=1, targets=(1, 2)), "must be COPY"),
    ],
)
def test_uses_that_cannot_be_met_are_refused(
    row_class: RowClass, use: StateUse | None, message: str
) -> None:
    rows = create_row_layout([RowRequest(3, row_class)], 2)
    with pytest.raises(ValueError, match=message):
        create_recurrent_step(rows, [use], 0)
