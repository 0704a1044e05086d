"""Fine blocks of heads: merged once, shared with all PCP ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.exchange_bench import Case, cases, expected, run


# a2a_fine: N = 4, COPY rows, h = 2 lanes cut in P' = 2.
#   all-to-all (3/4)*n*k*h*(Do+1)*e = 27e;  all-gather (P'-1)*n*(h/P')*Do*e = 6e, with lse 9e
@pytest.mark.parametrize(("keeps_lse", "shared"), [(False, 6), (True, 9)])
def test_fine_blocks_are_merged_once_and_shared(keeps_lse, shared):
    case = Case(2, 2, 3, 2, is_copy=True)
    for _, trace in run(case, "a2a_fine", traced=True, keeps_lse=keeps_lse):
        found = [(r.op, r.kind, r.bytes_received / 8) for r in trace.records]
        assert found == [
            ("all_gather", "slice", 18),
            ("all_to_all", "dcp", 27),
            ("all_gather", "pcp", shared),
        ]


@given(case=cases(), keeps_lse=st.booleans())
@settings(max_examples=25)
def test_fine_blocks_equal_dense(case, keeps_lse):
    """Copied rows whose heads can be cut; without its lse a state must not be merged on."""
    lanes = case.lanes * case.replicas
    used = None if case.used is None else case.used * case.replicas
    case = replace(case, lanes=lanes, is_copy=True, used=used)
    for position, merged in enumerate(run(case, "a2a_fine", keeps_lse=keeps_lse)):
        out, lse = expected(case, position)
        np.testing.assert_allclose(merged.out.numpy(), out, rtol=0, atol=1e-12)
        if keeps_lse:
            np.testing.assert_allclose(merged.lse.numpy(), lse, rtol=0, atol=1e-12)
        else:
            assert merged.lse.shape == lse.shape
            assert merged.lse.isnan().all()


@pytest.mark.parametrize("shape", [(2, 2, 3, 2), (3, 1, 2, 3)])
def test_fine_blocks_give_the_bits_of_all_others(shape):
    case = Case(*shape, is_copy=True, seed=11, dtype=torch.float32)
    for other, first in zip(run(case, "a2a_fine"), run(case, "a2a"), strict=True):
        assert torch.equal(other.out, first.out)
        assert torch.equal(other.lse, first.lse)


@pytest.mark.parametrize(("lanes", "is_copy"), [(3, True), (2, False)])
def test_rows_that_cannot_be_cut_are_refused(lanes, is_copy):
    case = Case(2, 1, 1, lanes, is_copy=is_copy)
    with pytest.raises(ValueError, match=f"a2a_fine cuts {lanes} head lanes"):
        run(case, "a2a_fine")
