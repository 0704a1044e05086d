"""Each thing is computed once, by units of bounded size."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.kernels.tiled_attention.plan import (
    MAX_BLOCK_LANES,
    MERGE_WORDS,
    MIN_PIECE,
    UNIT_WORDS,
    cut,
)
from tests.kernels.tiled_attention.tiled_inputs import HEAD_MAPS, PATTERNS, make_case

SEQUENCES = st.lists(
    st.tuples(st.sampled_from(list(PATTERNS)), st.integers(1, 100), st.integers(0, 3000)),
    min_size=1,
    max_size=3,
)


def units_of(work):
    return np.array(work.units).reshape(-1, UNIT_WORDS).tolist()


@given(sequences=SEQUENCES, head_map=st.sampled_from(list(HEAD_MAPS)))
@settings(max_examples=20)
def test_units_of_a_row_and_a_head_hold_each_key_once(sequences, head_map):
    case = make_case(sequences, head_map=head_map, block_size=64)
    plan, heads = case.plan, case.heads.tolist()
    work = cut(plan, heads)
    pieces = {}
    for start, end, group, first, last, _ in units_of(work):
        assert len({*plan.table_of_row[start:end].tolist()}) == 1
        for row in range(start, end):
            pieces.setdefault((row, work.heads[group]), []).append((first, last))
    assert {*pieces} == {(row, head) for row in range(len(plan.first)) for head in {*heads} - {-1}}
    for (row, _), ranges in pieces.items():
        ranges.sort()
        assert all(one[1] == other[0] for one, other in pairwise(ranges))
        if plan.first[row] < plan.end[row]:
            assert ranges[0][0] <= plan.first[row]
            assert plan.end[row] <= ranges[-1][1]


@given(sequences=SEQUENCES, head_map=st.sampled_from(list(HEAD_MAPS)))
@settings(max_examples=20)
def test_partial_states_have_places_of_their_own_and_are_merged(sequences, head_map):
    work = cut(make_case(sequences, head_map=head_map, block_size=64).plan, HEAD_MAPS[head_map])
    counts = np.diff(work.until)
    places = Counter()
    merged = Counter()
    for start, end, group, first, last, place in units_of(work):
        lanes = (end - start) * int(counts[group])
        assert lanes <= max(MAX_BLOCK_LANES, int(counts[group]))
        assert lanes <= work.max_lanes
        if place >= 0:
            assert last - first >= MIN_PIECE
            places.update(range(place, place + lanes))
    for start, end, group, place, pieces in np.array(work.merges).reshape(-1, MERGE_WORDS).tolist():
        assert pieces > 1
        merged.update(range(place, place + (end - start) * int(counts[group]) * pieces))
    assert places == merged == Counter(range(work.num_partial))


@given(sequences=SEQUENCES)
@settings(max_examples=10)
def test_long_units_come_first(sequences):
    costs = [
        (unit[1] - unit[0]) * (unit[4] - unit[3])
        for unit in units_of(cut(make_case(sequences, block_size=64).plan, HEAD_MAPS["even"]))
    ]
    assert costs == sorted(costs, reverse=True)


def test_lanes_are_kept_by_head():
    work = cut(make_case([("causal", 2, 3)]).plan, [2, 0, -1, 2, 0])
    assert (work.lanes.tolist(), work.until.tolist(), work.heads.tolist()) == (
        [1, 4, 0, 3],
        [0, 2, 4],
        [0, 2],
    )


def test_few_rows_with_many_keys_are_cut_for_threads():
    work = cut(make_case([("context", 1, 8000)]).plan, HEAD_MAPS["one for one"])
    assert len(units_of(work)) == 16
