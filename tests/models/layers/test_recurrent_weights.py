"""Spans of a fused tensor arrive in the order asked for, and are read once."""

from __future__ import annotations

import pytest
import torch

from heddle.errors import ModelFileError
from heddle.models.layers.recurrent_weights import join_spans, load_convolution, load_spans
from heddle.models.weights.loader import WeightLoader
from heddle.models.weights.memory import MemorySource
from tests.support.checkpoints import CPU, CountingSource


def test_spans_in_any_order() -> None:
    table = torch.arange(30.0).view(10, 3)
    source = CountingSource(MemorySource({"mixed": table}))
    loader = WeightLoader(source, torch.float32, CPU)
    found = load_spans(loader, "mixed", (10, 3), [(7, 9), (2, 2), (0, 1), (1, 3)])
    assert torch.equal(found, table[[7, 8, 0, 1, 2]])
    assert source.elements_read == {"mixed": 15}
    loader.finish()


def test_neighbours_join_only_in_order() -> None:
    assert join_spans([(3, 5), (5, 6), (0, 3)]) == [(3, 6), (0, 3)]


def test_another_shape_is_refused() -> None:
    loader = WeightLoader(MemorySource({"mixed": torch.zeros(10, 3)}), torch.float32, CPU)
    with pytest.raises(ModelFileError, match=r"mixed has shape \(10, 3\); \(9, 3\) was expected"):
        load_spans(loader, "mixed", (9, 3), [(0, 1)])


def test_taps_come_first_and_the_bias_follows_the_channels() -> None:
    weight, bias = torch.arange(12.0).view(4, 1, 3), torch.arange(4.0)
    source = MemorySource({"conv.weight": weight, "conv.bias": bias})
    loader = WeightLoader(source, torch.float32, CPU)
    found = load_convolution(loader, "conv", 4, 3, [(3, 4), (0, 2)], has_bias=True)
    assert torch.equal(found.weight, weight[[3, 0, 1], 0].t())
    assert found.bias is not None
    assert torch.equal(found.bias, bias[[3, 0, 1]])
