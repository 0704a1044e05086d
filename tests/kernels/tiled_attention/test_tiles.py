"""Stored types, and what of the pool is read."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from heddle.attention.quantized_rows import QuantizedRows
from heddle.kernels.tiled_attention.numba_cpu import paged_attention
from heddle.layout.cache_rows import RowFormat
from tests.kernels.tiled_attention.tiled_inputs import GQA, LATENT, check, make_case

SEQUENCES = [("causal", 30, 200), ("islands", 30, 0), ("window", 9, 40)]


@pytest.mark.parametrize("widths", [GQA, LATENT], ids=["gqa", "latent"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_16_bits_count_as_the_numbers_they_hold(dtype, widths):
    case = make_case(SEQUENCES, head_map="uneven", widths=widths)
    stored = case.rows.to(dtype)
    found = paged_attention(*case.arguments(rows=stored), num_threads=2)
    check(case, found, stored.float())


@pytest.mark.parametrize("widths", [GQA, LATENT], ids=["gqa", "latent"])
@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
def test_rows_of_bytes_count_as_codes_times_their_scales(dtype, widths):
    case = make_case(SEQUENCES, head_map="uneven", widths=widths)
    parts = (widths.key, widths.value) if widths is GQA else (widths.value, 8)
    row_format = RowFormat(dtype, parts)
    codec = QuantizedRows(row_format)
    stored = codec.encode(case.rows)
    found = paged_attention(*case.arguments(rows=stored), row_format=row_format, num_threads=2)
    check(case, found, codec.decode(stored, torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_queries_of_16_bits_are_computed_in_float32(dtype):
    case = make_case(SEQUENCES)
    narrow = dataclasses.replace(case, query=case.query.to(dtype))
    found = paged_attention(*narrow.arguments())
    wide = dataclasses.replace(case, query=narrow.query.float())
    assert all(map(torch.equal, found, paged_attention(*wide.arguments())))


def test_blocks_that_no_row_meets_need_not_exist():
    case = make_case([("window", 9, 400)])
    expected = paged_attention(*case.arguments())
    case.plan.block_tables[0, : 300 // case.plan.block_size] = 1 << 40
    case.plan.__dict__.pop("tiled_work")
    assert all(map(torch.equal, paged_attention(*case.arguments()), expected))
