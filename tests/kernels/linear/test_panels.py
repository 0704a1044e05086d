"""Panels hold every weight once, whatever pieces they are filled from."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.kernels.linear.base import PackedPart
from heddle.kernels.linear.panels import WIDTH, Panels, num_panels
from tests.kernels.bounds import randn


@given(st.integers(0, 50), st.integers(0, 9), st.data())
@settings(max_examples=60)
def test_pieces_in_any_order_make_the_matrix(num_outputs, num_inputs, data):
    weight = randn(num_outputs, num_inputs, seed=1).double()
    cuts = data.draw(st.lists(st.integers(0, num_outputs), max_size=4).map(sorted))
    middle = data.draw(st.integers(0, num_inputs))
    edges = [0, *cuts, num_outputs]
    spans = list(itertools.pairwise(edges))
    panels = Panels.zeros(num_outputs, num_inputs)
    whole = PackedPart.whole(panels)
    for first, end in data.draw(st.permutations(spans)):
        for start, until in ((middle, num_inputs), (0, middle)):
            part = weight[first:end, start:until]
            whole[first:end, start:until].copy_(part)
    assert torch.equal(panels.matrix(), weight.float().t())
    assert torch.equal(panels.data, Panels.of(weight.float()).data)


@pytest.mark.parametrize(("num_outputs", "count"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_the_last_panel_is_filled_up_with_zeros(num_outputs, count):
    panels = Panels.of(torch.ones(num_outputs, 3))
    assert num_panels(num_outputs) == count
    assert panels.data.shape == (count, 3, WIDTH)
    assert panels.data.sum() == num_outputs * 3


def test_columns_are_what_was_written():
    weight = randn(37, 5, seed=2)
    outputs = torch.tensor([36, 0, 16, 15, 36])
    assert torch.equal(Panels.of(weight).columns(outputs), weight[outputs])
