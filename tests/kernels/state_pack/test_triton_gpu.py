"""Packing in Triton against its reference, and the reference against the exchange of states."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.attention.exchange.a2a import packed, unpacked
from heddle.attention.exchange.placement import Placement
from heddle.attention.state import AttentionState
from heddle.attention.state import merge as merge_states
from heddle.kernels.state_pack import reference

CASES = {
    "replicas": st.integers(1, 3),
    "slices": st.integers(1, 3),
    "rows": st.integers(0, 3),
    "lanes": st.integers(1, 5),
    "width": st.sampled_from([1, 16, 20, 64]),
    "is_copy": st.booleans(),
}


def draw(replicas, slices, rows, lanes, width, is_copy):
    """A state of gathered rows whose every number is another one."""
    gathered = (rows if is_copy else replicas * rows, slices * lanes)
    out = torch.arange(gathered[0] * gathered[1] * width, dtype=torch.float32)
    lse = -1.0 - torch.arange(gathered[0] * gathered[1], dtype=torch.float32)
    return AttentionState(out.view(*gathered, width), lse.view(gathered))


def placement(replicas, slices, rows, lanes, is_copy):
    return Placement(
        num_replicas=replicas,
        slice_size=slices,
        num_rows=rows,
        lanes=lanes,
        is_copy=is_copy,
        position=0,
    )


@given(**CASES)
def test_the_reference_sends_what_the_exchange_sends(replicas, slices, rows, lanes, width, is_copy):
    state = draw(replicas, slices, rows, lanes, width, is_copy)
    blocks = reference.pack(state.out, state.lse, reference.Grid(replicas, slices, is_copy))
    places = placement(replicas, slices, rows, lanes, is_copy)
    assert torch.equal(blocks, places.destinations(packed(state)))
    parts = unpacked(blocks)
    for found, expected in zip(reference.unpack(blocks), (parts.out, parts.lse), strict=True):
        assert torch.equal(found, expected)


@given(**CASES)
@settings(max_examples=25)
def test_equals_the_reference_bit_for_bit(device, replicas, slices, rows, lanes, width, is_copy):
    from heddle.kernels.state_pack import triton_gpu

    state = draw(replicas, slices, rows, lanes, width, is_copy)
    grid = reference.Grid(replicas, slices, is_copy)
    expected = reference.pack(state.out, state.lse, grid)
    found = triton_gpu.pack(state.out.to(device), state.lse.to(device), grid)
    assert found.is_contiguous()
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("is_copy", [True, False])
def test_views_with_holes_are_packed(device, is_copy):
    from heddle.kernels.state_pack import triton_gpu

    state = draw(2, 2, 3, 4, 16, is_copy)
    wide = packed(state).to(device).transpose(0, 1).contiguous().transpose(0, 1)
    grid = reference.Grid(2, 2, is_copy)
    found = triton_gpu.pack(wide[..., :-1], wide[..., -1], grid)
    assert torch.equal(found.cpu(), reference.pack(state.out, state.lse, grid))


def test_packed_sent_and_merged_on_arrival_is_the_merge_of_partials(device):
    """Two ranks, each with partials of all rows: what position d gets merges to its own."""
    from heddle.kernels.state_merge import triton_gpu as merging
    from heddle.kernels.state_pack import triton_gpu

    generator = torch.Generator().manual_seed(4)
    partials = [
        AttentionState(
            torch.randn(2, 6, 16, generator=generator), torch.randn(2, 6, generator=generator)
        )
        for _ in range(2)
    ]
    grid = reference.Grid(1, 2, is_copy=False)
    sent = [triton_gpu.pack(each.out.to(device), each.lse.to(device), grid) for each in partials]
    whole = merge_states(partials)
    for position in range(2):
        received = torch.stack([blocks[position] for blocks in sent])
        out, lse = merging.merge(*reference.unpack(received))
        own = slice(position * 3, position * 3 + 3)
        torch.testing.assert_close(out.cpu(), whole.out[:, own])
        torch.testing.assert_close(lse.cpu(), whole.lse[:, own])
