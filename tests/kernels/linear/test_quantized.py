"""Packed numbers are those that were given, wherever they were put."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.kernels.linear.quantized import BytePanels, NibblePanels
from tests.kernels.bounds import randn


def whole_numbers(*shape, low, high, seed):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 40), st.integers(1, 4), st.booleans(), st.data())
@settings(max_examples=40)
def test_nibbles_come_back_bit_for_bit(num_outputs, num_blocks, is_half, data):
    q = whole_numbers(num_outputs, num_blocks, 32, low=0, high=16, seed=num_outputs)
    scales, offsets = randn(2, num_outputs, num_blocks, seed=1)
    if is_half:
        scales, offsets = scales.half().float(), offsets.half().float()
    row, block = data.draw(st.integers(0, num_outputs)), data.draw(st.integers(0, num_blocks))
    panels = NibblePanels.zeros(num_outputs, num_blocks * 32, is_half=is_half)
    for rows in (slice(row, None), slice(0, row)):
        for blocks in (slice(0, block), slice(block, None)):
            part = (rows, blocks)
            panels.place(rows.start, q[part], scales[part], offsets[part], start=32 * blocks.start)
    expected = (q * scales[..., None] + offsets[..., None]).flatten(1)
    assert panels.num_inputs == expected.shape[1]
    assert torch.equal(panels.matrix(), expected.t())
    places = torch.tensor([num_outputs - 1, 0])
    assert torch.equal(panels.columns(places), expected[places])


@given(st.integers(1, 40), st.integers(1, 3), st.sampled_from([8, 32, 64]))
@settings(max_examples=40)
def test_bytes_come_back_bit_for_bit(num_outputs, num_groups, group):
    q = whole_numbers(num_outputs, num_groups, group, low=-128, high=128, seed=num_outputs)
    scales = randn(num_outputs, num_groups, seed=2)
    panels = BytePanels.zeros(num_outputs, num_groups * group, group)
    panels.place(0, q.to(torch.int8), scales)
    expected = (q * scales[..., None]).flatten(1)
    assert torch.equal(panels.matrix(), expected.t())


@pytest.mark.parametrize("group", [8, 64])
def test_no_weight_moves_by_more_than_half_a_step_of_its_group(group):
    weight = randn(20, 3 * group, seed=3) * torch.logspace(-3, 3, 20)[:, None]
    weight[4, :group] = 0
    panels = BytePanels.zeros(20, 3 * group, group)
    panels.write(0, weight[:7])
    panels.write(7, weight[7:, : 2 * group])
    panels.write(7, weight[7:, 2 * group :], start=2 * group)
    groups = weight.unflatten(1, (-1, group))
    moved = (panels.matrix().t().unflatten(1, (-1, group)) - groups).abs()
    steps = groups.abs().amax(2, keepdim=True) / 127
    assert (moved <= 0.501 * steps).all()
    assert moved.max() > 0


def test_eight_bits_of_a_group_say_so_of_its_largest():
    weight = torch.tensor([[127.0, -127.0, 1.0, 0.0, 63.0, 2.0, -5.0, 99.0]])
    panels = BytePanels.zeros(1, 8, 8)
    panels.write(0, weight)
    assert torch.equal(panels.matrix().t(), weight)


def test_a_group_is_whole():
    with pytest.raises(AssertionError, match="40 inputs in blocks of 32"):
        NibblePanels.zeros(16, 40, is_half=True)
    with pytest.raises(AssertionError, match="40 inputs in groups of 64"):
        BytePanels.zeros(16, 40, 64)
