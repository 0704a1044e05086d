from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heddle.attention.exchange.placement import Placement

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 4), st.integers(1, 3))


def placement(shape, position=0, **options):
    replicas, slice_size, rows, lanes = shape
    return Placement(
        num_replicas=replicas,
        slice_size=slice_size,
        num_rows=rows,
        lanes=lanes,
        position=position,
        **({"is_copy": False} | options),
    )


def blocks_of(shape, is_copy):
    """Each value is its own address: (position, row, lane, column)."""
    replicas, slice_size, rows, lanes = shape
    count = slice_size if is_copy else replicas * slice_size
    return torch.arange(count * rows * lanes * 2).view(count, rows, lanes, 2)


def test_positions_lie_row_block_first():
    # P' = 2, k = 2, one row, one lane: positions 0 1 are the row blocks of head block 0.
    gathered = placement((2, 2, 1, 1)).assemble(torch.arange(4).view(4, 1, 1))
    assert gathered.tolist() == [[0, 2], [1, 3]]


def test_copy_rows_gather_heads_only_and_land_on_every_replica():
    place = placement((2, 2, 1, 1), is_copy=True)
    gathered = place.assemble(torch.tensor([10, 11]).view(2, 1, 1))
    assert gathered.tolist() == [[10, 11]]
    assert place.destinations(gathered).flatten().tolist() == [10, 10, 11, 11]


@given(SHAPES)
def test_each_row_and_head_comes_from_its_owner(shape):
    replicas, _, rows, lanes = shape
    blocks = blocks_of(shape, is_copy=False)
    gathered = placement(shape).assemble(blocks)
    assert gathered.shape[:2] == (placement(shape).gathered_rows, placement(shape).gathered_lanes)
    for row in range(gathered.shape[0]):
        for lane in range(gathered.shape[1]):
            owner = (lane // lanes) * replicas + row // rows
            assert torch.equal(gathered[row, lane], blocks[owner, row % rows, lane % lanes])


@given(SHAPES)
def test_destinations_undo_a_gather_bit_for_bit(shape):
    blocks = blocks_of(shape, is_copy=False)
    place = placement(shape)
    assert torch.equal(place.destinations(place.assemble(blocks)), blocks)


@given(SHAPES)
def test_destinations_of_copy_rows_repeat_over_replicas(shape):
    replicas, slice_size, *_ = shape
    blocks = blocks_of(shape, is_copy=True)
    place = placement(shape, is_copy=True)
    landed = place.destinations(place.assemble(blocks))
    assert len(landed) == replicas * slice_size
    for position, block in enumerate(landed):
        assert torch.equal(block, blocks[position // replicas])


@given(SHAPES, st.booleans())
def test_own_is_the_block_of_ones_position(shape, is_copy):
    replicas, slice_size, *_ = shape
    place = placement(shape, is_copy=is_copy)
    gathered = place.assemble(blocks_of(shape, is_copy))
    landed = place.destinations(gathered)
    for position in range(replicas * slice_size):
        here = placement(shape, position, is_copy=is_copy)
        assert torch.equal(here.own(gathered), landed[position])
        assert torch.equal(here.own(gathered[None], dim=1), landed[None, position])


def test_pad_lanes_never_saw_a_key():
    visible = torch.tensor([[True, False], [True, True]])
    everything = placement((2, 1, 1, 3)).seen(visible)
    assert torch.equal(everything, visible[..., None].expand(2, 2, 3))
    padded = placement((2, 1, 1, 3), used_lanes=(True, True, False)).seen(visible)
    assert torch.equal(padded[..., :2], everything[..., :2])
    assert not padded[..., 2].any()


@pytest.mark.parametrize(("is_copy", "rows"), [(False, 15), (True, 5)])
def test_sizes(is_copy, rows):
    place = placement((3, 2, 5, 4), is_copy=is_copy)
    assert (place.world_size, place.gathered_rows, place.gathered_lanes) == (6, rows, 8)
