"""Which tensors are taken as they lie, and which go to the reference."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from heddle.kernels.paged_decode.plan import RowWidths
from heddle.kernels.tiled_attention import reference
from heddle.kernels.tiled_attention.numba_cpu import dense_attention, paged_attention
from heddle.kernels.tiled_attention.reference import dense_plan
from tests.kernels.tiled_attention.tiled_inputs import GQA, LATENT, make_case


def straight(case):
    """Its keys and values, one below the other, and their plan; the rows are of one sequence."""
    size = case.plan.block_size
    slots = (case.plan.block_tables[0][:, None] * size + np.arange(size)).reshape(-1)
    rows = case.rows[torch.from_numpy(slots)]
    widths = case.widths
    key = rows[..., : widths.key]
    value = rows[..., widths.value_start : widths.value_start + widths.value]
    return key, value, dense_plan(case.plan.first, case.plan.end, len(rows))


def dense(case, query, key, value, plan, **options):
    return dense_attention(query, key, value, plan, case.heads, case.scale, case.softcap, **options)


@pytest.mark.parametrize("widths", [GQA, LATENT], ids=["gqa", "latent"])
@pytest.mark.parametrize("pattern", ["causal", "window", "islands"])
def test_keys_given_count_like_keys_in_the_pool(pattern, widths):
    case = make_case([(pattern, 50, 220)], widths=widths)
    expected = paged_attention(*case.arguments())
    key, value, plan = straight(case)
    found = dense(case, case.query, key, value, plan, num_threads=2)
    assert all(map(torch.equal, found, expected))


def test_strides_change_nothing():
    case = make_case([("causal", 50, 220)])
    key, value, plan = straight(case)
    expected = dense(case, case.query, key, value, plan)
    turned = [part.permute(2, 1, 0).contiguous().permute(2, 1, 0) for part in (key, value)]
    apart = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in (key, value)]
    query = case.query.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    lanes = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    for form in (turned, apart, [key.contiguous(), value.contiguous()], [key, apart[1]]):
        for rows in (case.query, query, lanes):
            assert all(map(torch.equal, dense(case, rows, *form, plan), expected))


def test_a_value_within_its_key_is_read_wherever_it_lies():
    case = make_case([("causal", 20, 30)])
    key, _, plan = straight(case)
    for start in (0, 8, 16):
        part = key[..., start : start + 8]
        found = dense(case, case.query, key, part, plan)
        expected = dense(case, case.query, key, part.clone(), plan)
        assert all(map(torch.equal, found, expected))


def test_one_kv_head_may_stand_for_all():
    case = make_case([("causal", 20, 30)])
    key, value, plan = straight(case)
    alike = [part[:, :1].expand(-1, 3, -1) for part in (key, value)]
    expected = dense(case, case.query, *(part.contiguous() for part in alike), plan)
    assert all(map(torch.equal, dense(case, case.query, *alike, plan), expected))


REFUSED = {
    "float64": (GQA, torch.float64, 0.25),
    "odd widths": (RowWidths(20, 20, 12), torch.float32, 0.25),
    "a scale below 0": (GQA, torch.float32, -0.25),
    "a scale of 0": (GQA, torch.float32, 0.0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_reference_serves_the_rest(name):
    widths, dtype, scale = REFUSED[name]
    case = make_case([("causal", 20, 30)], widths=widths, scale=scale)
    arguments = case.arguments(dtype)
    expected = reference.paged_attention(*arguments)
    assert all(map(torch.equal, paged_attention(*arguments, num_threads=2), expected))
    key, value, plan = straight(dataclasses.replace(case, rows=case.rows.to(dtype)))
    found = dense(case, case.query.to(dtype), key, value, plan, num_threads=2)
    assert all(map(torch.equal, found, expected))


def test_keys_and_values_of_two_types_go_to_the_reference():
    case = make_case([("causal", 20, 30)])
    key, value, plan = straight(case)
    found = dense(case, case.query, key, value.half(), plan)
    expected = reference.dense_attention(
        case.query, key, value.half(), plan, case.heads, case.scale
    )
    assert all(map(torch.equal, found, expected))


def test_no_rows_give_no_states():
    case = make_case([("causal", 1, 30)])
    key, value, _ = straight(case)
    none = np.zeros(0, np.int64)
    found = dense(case, case.query[:0], key, value, dense_plan(none, none, len(key)))
    assert [tuple(part.shape) for part in found] == [(0, 6, 24), (0, 6)]


def test_no_keys_give_nil_states():
    case = make_case([("causal", 2, 30)])
    key, value, _ = straight(case)
    zeros = np.zeros(2, np.int64)
    out, lse = dense(case, case.query, key[:0], value[:0], dense_plan(zeros, zeros, 0))
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
