"""The merge in Triton against its reference, and the reference against the merge of states."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.attention.state import AttentionState
from heddle.attention.state import merge as merge_states
from heddle.kernels.state_merge import reference


def draw_states(states, rows, lanes, width, seed, dtype=torch.float32):
    """States with some that saw nothing and hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(states, rows, lanes, width, generator=generator, dtype=dtype)
    lses = 8 * torch.randn(states, rows, lanes, generator=generator, dtype=dtype)
    blind = torch.rand(states, rows, lanes, generator=generator) < 0.3
    blind[:, :1] |= torch.rand(1, 1, lanes, generator=generator) < 0.5  # seen by no state
    return outs.masked_fill(blind[..., None], math.nan), lses, ~blind


CASES = {
    "states": st.integers(1, 5),
    "rows": st.integers(0, 3),
    "lanes": st.integers(1, 5),
    "width": st.sampled_from([1, 16, 20, 64]),
    "seed": st.integers(0, 999),
}


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu(), rtol=2e-6, atol=1e-6)


@given(**CASES)
@settings(max_examples=25)
def test_the_reference_is_the_merge_of_states(states, rows, lanes, width, seed):
    outs, lses, seen = draw_states(states, rows, lanes, width, seed, torch.float64)
    lses = lses.masked_fill(~seen, -math.inf)
    expected = merge_states(AttentionState(outs, lses))
    for found in (reference.merge(outs, lses), reference.merge(outs, lses, seen)):
        torch.testing.assert_close(found[0], expected.out, rtol=0, atol=1e-12)
        torch.testing.assert_close(found[1], expected.lse, rtol=0, atol=1e-12)


@given(**CASES)
@settings(max_examples=8)
def test_equals_the_reference(device, states, rows, lanes, width, seed):
    from heddle.kernels.state_merge import triton_gpu

    outs, lses, seen = (part.to(device) for part in draw_states(states, rows, lanes, width, seed))
    empty = lses.masked_fill(~seen, -math.inf)
    assert_close(triton_gpu.merge(outs, empty), reference.merge(outs, empty))
    # A mask says what was seen; the lse of what was not may be anything.
    for poison in (math.nan, math.inf, 1e30):
        found = triton_gpu.merge(outs, lses.masked_fill(~seen, poison), seen)
        assert_close(found, reference.merge(outs, empty))
        nothing = ~seen.any(0)
        assert (found[0][nothing] == 0).all()
        assert (found[1][nothing] == -math.inf).all()


def test_float64_is_merged_in_float64(device):
    from heddle.kernels.state_merge import triton_gpu

    outs, lses, seen = draw_states(4, 2, 3, 20, 5, torch.float64)
    found = triton_gpu.merge(outs.to(device), lses.to(device), seen.to(device))
    for one, other in zip(found, reference.merge(outs, lses, seen), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=1e-12)


def test_views_with_holes_are_read_where_they_lie(device):
    from heddle.kernels.state_merge import triton_gpu

    packed = torch.randn(3, 4, 5, 17, generator=torch.Generator().manual_seed(3)).to(device)
    seen = torch.tensor([True, False, True], device=device)[:, None, None]
    views = packed.transpose(1, 2)
    found = triton_gpu.merge(views[..., :-1], views[..., -1], seen)
    assert_close(found, reference.merge(views[..., :-1], views[..., -1], seen))


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_broken_part_that_saw_keys_is_never_dropped(device, broken):
    from heddle.kernels.state_merge import triton_gpu

    outs, lses = torch.ones(3, 1, 2, 16), torch.zeros(3, 1, 2)
    lses[1, 0, 0] = broken
    seen = torch.ones(3, 1, 2, dtype=torch.bool)
    out, lse = triton_gpu.merge(outs.to(device), lses.to(device), seen.to(device))
    assert out[0, 0].isnan().all()
    assert lse[0, 0].isnan()
    assert (out[0, 1] == 1).all()


def test_large_sums_stay_in_range(device):
    from heddle.kernels.state_merge import triton_gpu

    outs, lses = torch.ones(2, 1, 1, 16), torch.tensor([1e4, 1e4 - 1]).view(2, 1, 1)
    out, lse = triton_gpu.merge(outs.to(device), lses.to(device))
    assert (out - 1).abs().max() < 1e-6
    assert lse.item() == pytest.approx(1e4 + math.log1p(math.exp(-1)))
