"""The compiled form against float64, with plain torch in float32 as the measure."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.kernels.paged_decode.numba_cpu import paged_decode
from heddle.kernels.paged_decode.plan import PagedPlan, RowWidths
from heddle.kernels.paged_decode.reference import paged_decode as plain_decode
from heddle.kernels.row_encode.reference import decode, encode
from heddle.layout.cache_rows import RowFormat
from tests.kernels.bounds import assert_as_close
from tests.kernels.paged_decode.paged_inputs import HEAD_MAPS, format_of, make_case

SMALL = RowWidths(8, 8, 8)
GQA = RowWidths(24, 24, 40)
WIDE = RowWidths(128, 128, 128)
LATENT = RowWidths(576, 0, 512)
INSIDE = RowWidths(48, 8, 24)
"""A value somewhere in the key."""


def run(case, threads=2, softcap=0.0, row_format=None):
    device = torch.device("cpu")
    return paged_decode(*case.arguments(device), softcap, row_format, num_threads=threads)


def check(case, found, softcap=0.0, rows=None):
    """At most twice the error of plain torch in float32, and a rounding step; nil is exact."""
    rows = case.rows.float() if rows is None else rows
    exact = case.oracle(softcap, rows)
    wide = (case.query.float(), rows)
    plain = plain_decode(*wide, case.plan, case.widths, case.heads, case.scale, softcap)
    nil = exact[1] == -math.inf
    assert (found[0][nil] == 0).all()
    assert (found[1][nil] == -math.inf).all()
    for one, other, right in zip(found, plain, exact, strict=True):
        assert_as_close(one[~nil], other[~nil], right[~nil])


def assert_equal(one, other):
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


@given(
    ranges=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=4),
    head_map=st.sampled_from(list(HEAD_MAPS)),
    widths=st.sampled_from([SMALL, GQA, WIDE, INSIDE]),
    block_size=st.sampled_from([1, 3, 16, 128]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 999),
)
@settings(max_examples=60)
def test_equals_dense_attention(ranges, head_map, widths, block_size, threads, seed):
    """Any order of blocks, rows without keys, windows, uneven heads, NaN beside what is met."""
    case = make_case(
        [max(pair) for pair in ranges],
        firsts=[min(pair) for pair in ranges],
        head_map=head_map,
        widths=widths,
        block_size=block_size,
        seed=seed,
    )
    check(case, run(case, threads))


@pytest.mark.parametrize("length", [1, 7, 8, 9, 63, 64, 65, 256, 257, 1000, 20_000])
def test_tiles_and_pieces_leave_no_seam(length):
    case = make_case([length], head_map="even", widths=GQA, block_size=16, seed=length)
    check(case, run(case))


@pytest.mark.parametrize("head_map", ["one for many", "uneven", "pads inside"])
def test_the_value_of_a_latent_row_is_its_start(head_map):
    case = make_case([90, 17], firsts=[20, 0], head_map=head_map, widths=LATENT, scale=0.04)
    check(case, run(case))


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_a_soft_cap_is_part_of_scores_and_lse(softcap):
    case = make_case([140], head_map="even", widths=GQA, seed=2, scale=2.0)
    check(case, run(case, softcap=softcap), softcap)


@pytest.mark.parametrize("scale", [4e3, -1.0])
def test_large_and_turned_scores_stay_exact(scale):
    case = make_case([140], head_map="even", widths=GQA, seed=2, scale=scale)
    check(case, run(case))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widths", [GQA, LATENT])
def test_rows_of_16_bits_count_as_the_numbers_they_hold(dtype, widths):
    case = make_case([90, 7], dtype=dtype, query_dtype=torch.float32, widths=widths, scale=0.1)
    check(case, run(case))
    narrow = dataclasses.replace(case, query=case.query.to(dtype))
    check(narrow, run(narrow))


def test_the_whole_range_of_a_float16_is_read():
    """Subnormals and the largest."""
    values = torch.tensor([2.0**-24, -3 * 2.0**-24, 2.0**-14, 65504.0, -65504.0, 0.0, 1.0, -1.5])
    case = make_case([1], head_map="one for many", widths=SMALL, dtype=torch.float16)
    case.rows[case.met[0], 0, 8:] = values.half()
    found, _ = run(case)
    assert torch.equal(found[0], values.expand(len(case.heads), 8))


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("widths", [GQA, LATENT])
@pytest.mark.parametrize("head_map", ["uneven", "one for many"])
def test_codes_count_as_numbers_times_their_scales(dtype, widths, head_map):
    """With scales that differ by part and by row, and one of NaN beside what is met."""
    case = make_case([90, 9], widths=widths, head_map=head_map, seed=4, scale=0.1)
    row_format = format_of(widths, dtype)
    rows = case.rows * torch.logspace(-2, 0, len(case.rows))[:, None, None]
    rows[..., widths.key // 2 :] *= 2.0
    stored = encode(rows, row_format)
    coded = dataclasses.replace(case, rows=stored)
    check(coded, run(coded, row_format=row_format), rows=decode(stored, row_format))


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
def test_each_code_is_the_number_that_it_means(dtype):
    """All 256 as values of one key: the weight is 1."""
    row_format = RowFormat(dtype, (8, 256))
    stored = torch.zeros(1, 1, row_format.width, dtype=torch.uint8)
    stored[0, 0, 8:264] = torch.arange(256, dtype=torch.uint8)
    stored[0, 0, 264:] = torch.tensor([1.0, 0.5]).view(torch.uint8)
    plan = PagedPlan(np.zeros((1, 1), np.int64), np.zeros(1, np.int64), np.zeros(1), np.ones(1), 1)
    plan = dataclasses.replace(plan, first=np.zeros(1, np.int64), end=np.ones(1, np.int64))
    one = np.zeros(1, np.int32)
    found, _ = paged_decode(
        torch.ones(1, 1, 8), stored, plan, RowWidths(8, 8, 256), one, 1.0, 0.0, row_format
    )
    kind = torch.int8 if dtype == "int8" else torch.float8_e4m3fn
    meant = torch.arange(256, dtype=torch.uint8).view(kind).float() / 2
    known = meant.isfinite()  # encoding makes no NaN of e4m3
    assert known.sum() >= 254
    assert torch.equal(found[0, 0][known], meant[known])


@pytest.mark.parametrize("row_format", [RowFormat("int8", (24, 40)), None])
def test_a_part_or_an_element_of_nan_that_is_seen_comes_out(row_format):
    for place, element in ((0, 0), (63, 3), (64, 30), (299, 63)):
        case = make_case([300, 5], head_map="even", widths=GQA, block_size=1)
        case.rows[case.met] = case.rows[case.met].nan_to_num(1.0)
        case.rows[int(case.plan.block_tables[0, place]), 1, element] = math.nan
        rows = case.rows if row_format is None else encode(case.rows, row_format)
        out, lse = run(dataclasses.replace(case, rows=rows), row_format=row_format)
        hit = np.flatnonzero(case.heads == 1)
        seen = out[0, hit] if element < 24 or row_format else out[0, hit, element - 24]
        assert seen.isnan().all()
        assert lse[0, hit].isnan().all() == (element < 24)
        assert not out[1].isnan().any() or place < 5
        assert not out[0, case.heads == 0].isnan().any()


@pytest.mark.parametrize("widths", [WIDE, LATENT])
def test_bits_depend_neither_on_threads_nor_on_the_run(widths):
    case = make_case([1500, 3, 700, 64], firsts=[0, 0, 600, 0], head_map="even", widths=widths)
    found = run(case, 1)
    for threads in (1, 2, 3, 7):
        assert_equal(run(case, threads), found)


def test_rows_do_not_feel_each_other():
    case = make_case([400, 30, 200], head_map="even", widths=GQA)
    out, lse = run(case)
    for row in range(3):
        one = slice(row, row + 1)
        plan = dataclasses.replace(
            case.plan,
            table_of_row=case.plan.table_of_row[one],
            first=case.plan.first[one],
            end=case.plan.end[one],
        )
        alone = dataclasses.replace(case, query=case.query[one], plan=plan)
        assert_equal(run(alone), (out[one], lse[one]))


def test_blocks_beyond_32_bits_are_found():
    """Block numbers times rows of bytes pass 2^31, in memory that is never touched."""
    rows = torch.empty(1 << 22, 1, 1 << 10)[:, :, :]
    far = rows.shape[0] // 16 - 2
    rows[far * 16 : (far + 1) * 16] = torch.randn(16, 1, 1 << 10)
    plan = PagedPlan(
        np.array([[far]]), np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([9]), 16
    )
    assert (far * 16) << 12 > 1 << 33
    query, one = torch.randn(1, 1, 512), np.zeros(1, np.int32)
    arguments = (plan, RowWidths(512, 512, 512), one, 0.05)
    found, plain = (f(query, rows, *arguments) for f in (paged_decode, plain_decode))
    for a, b in zip(found, plain, strict=True):
        assert (a - b).abs().max() < 1e-5


def test_what_the_kernel_does_not_take_goes_to_the_reference():
    """Wider floats, odd widths, a pool with gaps, codes whose parts are not key and value."""
    wide = make_case([20], head_map="even", dtype=torch.float64, widths=GQA)
    odd = make_case([20], head_map="even", widths=RowWidths(20, 20, 12))
    whole = make_case([20], head_map="even", widths=GQA)
    holes = torch.full((len(whole.rows), 2, 100), math.nan)
    holes[..., :64] = whole.rows
    gaps = dataclasses.replace(whole, rows=holes[..., :64])
    for case in (wide, odd, gaps):
        expected = plain_decode(*case.arguments(torch.device("cpu")))
        assert_equal(run(case), expected)
    row_format = RowFormat("int8", (16, 48))
    stored = encode(whole.rows, row_format)
    coded = dataclasses.replace(whole, rows=stored)
    check(coded, run(coded, row_format=row_format), rows=decode(stored, row_format))


def test_queries_are_read_by_their_strides():
    case = make_case([20, 7], head_map="even", widths=GQA)
    turned = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not turned.is_contiguous()
    assert_equal(run(dataclasses.replace(case, query=turned)), run(case))
