"""The convolution equals the library's, in batches and in pieces."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from heddle.attention.recurrent.convolution import Convolution


def draw(taps: int, has_bias: bool) -> tuple[Convolution, torch.Tensor]:
    generator = torch.Generator().manual_seed(taps)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return Convolution(randn(taps, 5), randn(5) if has_bias else None), randn(2, 12, 5)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("taps", [2, 3, 4])
def test_it_is_a_depthwise_convolution(taps: int, has_bias: bool) -> None:
    convolution, rows = draw(taps, has_bias)
    before = rows.clone()
    found = convolution(rows)
    weight = convolution.weight.t()[:, None]
    dense = functional.conv1d(rows.transpose(1, 2), weight, convolution.bias, groups=5)
    assert found.shape == (2, 12 - convolution.num_history, 5)
    assert (found - functional.silu(dense).transpose(1, 2)).abs().max() <= 1e-13
    assert torch.equal(rows, before)


def test_pieces_with_the_rows_before_them_equal_the_whole() -> None:
    convolution, rows = draw(4, True)
    whole = convolution(rows[0])
    for cut in range(10):
        pieces = [convolution(rows[0, : cut + 3]), convolution(rows[0, cut:])]
        assert (torch.cat(pieces) - whole).abs().max() <= 1e-13
