"""Paged attention in Triton against float64, with the reference in float32 as the measure."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.attention.quantized_rows import QuantizedRows
from heddle.kernels.paged_decode.plan import RowWidths
from tests.kernels.paged_decode.paged_inputs import (
    GQA,
    HEAD_MAPS,
    LATENT,
    ODD,
    check,
    format_of,
    make_case,
    run,
)


@given(
    ranges=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=3),
    head_map=st.sampled_from(list(HEAD_MAPS)),
    widths=st.sampled_from([GQA, ODD, LATENT]),
    block_size=st.sampled_from([1, 4, 16]),
    num_splits=st.sampled_from([1, 2, 5]),
    seed=st.integers(0, 999),
)
@settings(max_examples=8)
def test_equals_dense_attention(device, ranges, head_map, widths, block_size, num_splits, seed):
    """Any order of blocks, rows without keys, windows, uneven heads, NaN beside what is met."""
    case = make_case(
        [max(pair) for pair in ranges],
        firsts=[min(pair) for pair in ranges],
        head_map=head_map,
        widths=widths,
        block_size=block_size,
        seed=seed,
    )
    check(case, run(case, device, num_splits=num_splits))


@pytest.mark.parametrize("num_splits", [1, 4])
def test_long_rows_pass_through_many_tiles(device, num_splits):
    case = make_case([150, 129, 1], firsts=[0, 40, 0], head_map="even", block_size=16)
    check(case, run(case, device, num_splits=num_splits))


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_a_soft_cap_is_part_of_scores_and_lse(device, softcap):
    case = make_case([40], head_map="even", seed=2, scale=2.0)
    check(case, run(case, device, softcap, num_splits=2), softcap)


@pytest.mark.parametrize(
    ("dtype", "query_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.float16),
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("widths", [GQA, LATENT])
def test_rows_of_16_bits_err_like_float32(device, dtype, query_dtype, widths):
    """Partials stay float32: neither weights nor queries are rounded to the type of the cache."""
    case = make_case(
        [70], dtype=dtype, query_dtype=query_dtype, widths=widths, head_map="even", seed=3
    )
    check(case, run(case, device))


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize(
    ("widths", "query_dtype"),
    [
        (GQA, torch.float32),
        (GQA, torch.bfloat16),
        (LATENT, torch.float32),
        (RowWidths(24, 24, 24), torch.bfloat16),
    ],
)
def test_codes_are_read_in_place(device, dtype, widths, query_dtype):
    """Against attention over the decoded rows, with scales that differ by part and by row."""
    case = make_case([40, 9], widths=widths, head_map="even", seed=4, query_dtype=query_dtype)
    form = format_of(widths, dtype)
    codec = QuantizedRows(form)
    rows = case.rows * torch.logspace(-2, 0, len(case.rows))[:, None, None]
    rows[..., widths.key // 2 :] *= 2.0
    stored = codec.encode(rows)
    decoded = codec.decode(stored, torch.float32)
    coded = dataclasses.replace(case, rows=stored)
    check(coded, run(coded, device, row_format=form, num_splits=2), rows=decoded)


def test_codes_of_nan_reach_the_output(device):
    case = make_case([5, 3], head_map="even")
    rows = case.rows.clone()
    rows[case.met[0], 0, 0] = math.nan
    form = format_of(GQA, "int8")
    coded = dataclasses.replace(case, rows=QuantizedRows(form).encode(rows))
    plain = dataclasses.replace(case, rows=rows)
    for found in (run(coded, device, row_format=form), run(plain, device)):
        is_nan = plain.oracle()[1].isnan()
        assert is_nan.any()
        assert not is_nan.all()
        assert torch.equal(found[0].isnan().all(-1), is_nan)
        assert torch.equal(found[1].isnan(), is_nan)


@pytest.mark.parametrize("place", [0, 31, 32, 69])
@pytest.mark.parametrize("element", [0, 17])
def test_a_visible_nan_always_reaches_the_output(device, place, element):
    """In a key and in a value, in any tile and split."""
    case = make_case([70], head_map="one for many", block_size=1)
    slot = int(case.plan.block_tables[0, place])
    case.rows[slot, 0, element] = math.nan
    for num_splits in (1, 3):
        out, _ = run(case, device, num_splits=num_splits)
        seen = out if element == 0 else out[..., element - 16]
        assert seen.isnan().all()


def test_large_scores_stay_finite_and_normalised(device):
    case = make_case([40], head_map="even", scale=4e3)
    case.rows[..., 16:] = torch.where(case.rows[..., 16:].isnan(), math.nan, 1.0)
    out, lse = run(case, device, num_splits=2)
    assert lse.max() > 1e4
    assert (out - 1).abs().max() < 1e-6
