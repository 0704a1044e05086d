"""Tiled attention against float64, with plain torch in float32 as the measure."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.kernels.tiled_attention.numba_cpu import paged_attention
from tests.kernels.tiled_attention.tiled_inputs import (
    GQA,
    HEAD_MAPS,
    LATENT,
    PATTERNS,
    WIDE,
    check,
    make_case,
)

SEQUENCES = st.lists(
    st.tuples(st.sampled_from(list(PATTERNS)), st.integers(1, 40), st.integers(0, 60)),
    min_size=1,
    max_size=3,
)


@given(
    sequences=SEQUENCES,
    head_map=st.sampled_from(list(HEAD_MAPS)),
    widths=st.sampled_from([GQA, WIDE, LATENT]),
    block_size=st.sampled_from([1, 6, 16]),
    softcap=st.sampled_from([0.0, 0.0, 2.0]),
    seed=st.integers(0, 999),
)
@settings(max_examples=25)
def test_equals_softmax_attention(sequences, head_map, widths, block_size, softcap, seed):
    """Causal rows, windows, islands with holes between them, rows without keys, uneven heads."""
    case = make_case(
        sequences,
        head_map=head_map,
        widths=widths,
        block_size=block_size,
        softcap=softcap,
        seed=seed,
    )
    check(case, paged_attention(*case.arguments(), num_threads=2))


LONG = {
    "tiles": ([("causal", 40, 300)], "even", WIDE),
    "windows past a tile": ([("window", 200, 200)], "even", GQA),
    "pieces": ([("context", 1, 1500)], "even", GQA),
    "pieces of a latent": ([("causal", 3, 1030)], "one for many", LATENT),
    "pieces beside none": ([("none", 2, 0), ("causal", 1, 700)], "uneven", GQA),
}


@pytest.mark.parametrize("name", LONG)
def test_many_tiles_and_pieces_equal_one(name):
    sequences, head_map, widths = LONG[name]
    case = make_case(sequences, head_map=head_map, widths=widths)
    check(case, paged_attention(*case.arguments(), num_threads=3))


@pytest.mark.parametrize("name", LONG)
def test_the_number_of_threads_changes_no_bit(name):
    sequences, head_map, widths = LONG[name]
    arguments = make_case(sequences, head_map=head_map, widths=widths).arguments()
    alone = paged_attention(*arguments, num_threads=1)
    for num_threads in (1, 2, 3):
        found = paged_attention(*arguments, num_threads=num_threads)
        assert all(map(torch.equal, found, alone))


def test_scores_far_from_zero_neither_overflow_nor_vanish():
    case = make_case([("causal", 20, 300)], scale=60.0)
    out, lse = paged_attention(*case.arguments())
    assert lse.abs().max() > 1000
    check(case, (out, lse))


def test_a_peak_that_rises_late_leaves_nothing_of_what_was_before():
    case = make_case([("context", 4, 400)], head_map="one for one")
    table, size = case.plan.block_tables[0], case.plan.block_size
    last = int(table[399 // size] * size + 399 % size)
    case.rows[last, :2, : GQA.key] = 1000 * case.query[0]
    out, lse = paged_attention(*case.arguments())
    value = case.rows[last, :2, GQA.value_start :]
    assert torch.allclose(out[0], value, rtol=torch.finfo(torch.float32).eps, atol=0)
    check(case, (out, lse))


def test_a_nan_reaches_the_rows_that_see_it_and_no_lane_of_another_head():
    case = make_case([("causal", 30, 0)])
    table, size = case.plan.block_tables[0], case.plan.block_size
    seen_from = 20
    slot = int(table[seen_from // size] * size + seen_from % size)
    case.rows[slot, 0, 0] = math.nan
    out, lse = paged_attention(*case.arguments())
    assert out[seen_from:, :3].isnan().all()
    assert lse[seen_from:, :3].isnan().all()
    assert not out[:, 3:].isnan().any()
    assert not lse[:seen_from].isnan().any()
