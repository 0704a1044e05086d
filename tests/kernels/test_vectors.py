"""Vector instructions against sums in float64."""

from __future__ import annotations

from array import array

import numba
import pytest
import torch
from numba import types

from heddle.kernels.compiled import given, inner
from heddle.kernels.threads import launch
from heddle.kernels.vectors import LANES, largest, scale, tile_product

_HEIGHT, _WIDTH, _DEPTH = 3, 2, 5
_adds, _sets = tile_product(_HEIGHT, _WIDTH), tile_product(_HEIGHT, _WIDTH, adds=False)


def _entry(body):
    """A kernel that is not kept."""
    return numba.cfunc(types.void(types.voidptr))(body).address


@inner
def _product_of(w, adds):
    if adds:
        _adds(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7])
    else:
        _sets(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7])


def _run_product(address):
    w = given(address, 9)
    _product_of(w, w[8] != 0)


@pytest.mark.parametrize("adds", [True, False])
def test_a_tile_is_a_product_of_strided_rows_and_touches_nothing_else(adds: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    columns = _WIDTH * LANES
    a = torch.randn(_DEPTH, 7, generator=generator)  # A[m, k] lies at [k, 2 m]
    b = torch.randn(_DEPTH, columns + 3, generator=generator)
    c = torch.randn(_HEIGHT + 1, columns + 2, generator=generator)
    before = c.clone()
    words = array(
        "q",
        (a.data_ptr(), 2, 7, b.data_ptr(), columns + 3, c.data_ptr(), columns + 2, _DEPTH, adds),
    )
    launch(_entry(_run_product), words, 1)
    exact = a[:, 0 : 2 * _HEIGHT : 2].double().t() @ b[:, :columns].double()
    exact += before[:_HEIGHT, :columns].double() * adds
    assert torch.allclose(c[:_HEIGHT, :columns].double(), exact, rtol=0, atol=2e-6)
    assert torch.equal(c[:, columns:], before[:, columns:])
    assert torch.equal(c[_HEIGHT:], before[_HEIGHT:])


def _run_rows(address):
    w = given(address, 2)
    scale(w[0], largest(w[0], w[1]), w[1])


@pytest.mark.parametrize("count", [8, 24])
def test_the_largest_number_of_a_row_scales_it(count: int) -> None:
    row = torch.randn(count + 1, generator=torch.Generator().manual_seed(count))
    before = row.clone()
    launch(_entry(_run_rows), array("q", (row.data_ptr(), count)), 1)
    assert torch.equal(row[:count], before[:count] * before[:count].max())
    assert row[count] == before[count]
