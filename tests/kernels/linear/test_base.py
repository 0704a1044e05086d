"""A range of a range is a range; segments lie side by side."""

from __future__ import annotations

import pytest
import torch

from heddle.kernels.linear.base import PackedPart, Segments, SegmentsPart
from heddle.kernels.linear.panels import Panels
from heddle.kernels.linear.quantized import NibblePanels
from tests.kernels.bounds import randn


def test_a_part_of_a_part_is_counted_from_its_start():
    panels = Panels.zeros(40, 8)
    part = PackedPart.whole(panels)[10:30, 2:6][5:][:3, 1:]
    assert (part.outputs, part.inputs, part.shape) == ((15, 18), (3, 6), (3, 3))
    part.copy_(torch.ones(3, 3))
    expected = torch.zeros(8, 40)
    expected[3:6, 15:18] = 1
    assert torch.equal(panels.matrix(), expected)


def test_segments_are_filled_and_read_as_one():
    first, second = Panels.zeros(5, 4), Panels.zeros(20, 4)
    target = SegmentsPart((PackedPart.whole(first), PackedPart.whole(second)))
    weight = randn(25, 4, seed=1)
    for start, end in ((0, 5), (5, 20), (20, 25)):
        target[start:end].copy_(weight[start:end])
    whole = Segments((first, second))
    assert (whole.num_outputs, whole.num_inputs) == (25, 4)
    assert torch.equal(whole.matrix(), weight.t())
    places = torch.tensor([24, 0, 5])
    assert torch.equal(whole.columns(places), weight[places])
    with pytest.raises(IndexError, match="outputs 4 to 6 lie in no one part"):
        target[4:6]


def test_numbers_do_not_fill_what_a_file_packs():
    part = PackedPart.whole(NibblePanels.zeros(4, 32, is_half=True), "Q4_1")
    with pytest.raises(AssertionError, match="its file's own blocks do"):
        part.copy_(torch.ones(4, 32))
