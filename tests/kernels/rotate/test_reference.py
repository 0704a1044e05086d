"""Against complex numbers: a pair that turns by an angle is a product with a number of length 1."""

from __future__ import annotations

import pytest
import torch

from heddle.kernels.rotate.reference import HeadNorm, Turns, rotate, turn


@pytest.mark.parametrize("interleaved", [False, True])
def test_pairs_turn_and_the_rest_stays(interleaved):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 10, generator=generator, dtype=torch.float64)
    angles = torch.randn(3, 1, 4, generator=generator, dtype=torch.float64)
    found = turn(x, Turns(angles.cos(), angles.sin(), interleaved))
    first, second = (x[..., 0:8:2], x[..., 1:8:2]) if interleaved else (x[..., :4], x[..., 4:8])
    pairs = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    parts = (pairs.real, pairs.imag)
    expected = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    assert (found[..., :8] - expected).abs().max() < 1e-14
    assert torch.equal(found[..., 8:], x[..., 8:])


@pytest.mark.parametrize("has_norm", [False, True])
def test_keys_lie_beside_their_values(has_norm):
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(4, 3 + 2 * 2, 6, generator=generator, dtype=torch.float64)
    nothing = Turns(torch.ones(4, 1, 3), torch.zeros(4, 1, 3), False)
    weight = torch.arange(1.0, 6.0, dtype=torch.float64)[:, None].expand(5, 6)
    norm = HeadNorm(weight, 0.0) if has_norm else None
    query, rows = rotate(heads, 3, nothing, norm)
    met = heads[:, :5]
    if has_norm:
        met = met / (met**2).mean(-1, keepdim=True).sqrt() * weight
    assert (query - met[:, :3]).abs().max() < 1e-14
    assert (rows[..., :6] - met[:, 3:]).abs().max() < 1e-14
    assert torch.equal(rows[..., 6:], heads[:, 5:])
