"""Compiled kernels change no law of the exchanges."""

from __future__ import annotations

import pytest
import torch

from heddle.kernels.registry import create_kernels
from tests.kernels.bounds import assert_as_close
from tests.support.exchange_bench import Case, expected, run

NAMES = ("ag_rs", "ag_ar", "a2a", "a2a_fine")
SHAPES = [(2, 2, 3, 2, False), (3, 1, 2, 3, True), (1, 4, 2, 1, False), (2, 2, 1, 2, True)]


@pytest.mark.parametrize("shape", SHAPES)
def test_all_exchanges_equal_dense_and_each_other_bit_for_bit(shape):
    *sizes, is_copy = shape
    case = Case(*sizes, is_copy=is_copy, seed=11, dtype=torch.float32)
    kernels = create_kernels("numba")
    names = NAMES if is_copy else NAMES[:3]
    found = {name: run(case, name, strict=False, kernels=kernels) for name in names}
    plain = run(case, "ag_rs")
    for position, one in enumerate(found["ag_rs"]):
        out, lse = (torch.from_numpy(part) for part in expected(case, position))
        assert_as_close(one.out, plain[position].out, out)
        seen = lse.isfinite()
        assert_as_close(one.lse[seen], plain[position].lse[seen], lse[seen])
        assert torch.equal(one.lse[~seen], plain[position].lse[~seen])
        for name in names:
            assert torch.equal(found[name][position].out, one.out)
            assert torch.equal(found[name][position].lse, one.lse)
