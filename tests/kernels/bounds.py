"""What a compiled form may differ by: twice the error of the plain float32 form, and a rounding."""

from __future__ import annotations

import torch


def assert_as_close(found, plain, exact):
    """Errors against float64 of a compiled form and of the plain one, all of one shape."""
    assert found.shape == plain.shape == exact.shape
    assert found.dtype == plain.dtype
    if exact.numel() == 0:
        return
    bound = 2 * (plain.double() - exact).abs().max() + exact.abs().max() * 2**-23
    assert (found.double() - exact).abs().max() <= bound


def randn(*shape, seed, scale=1.0):
    """Float32, the same for a seed."""
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
