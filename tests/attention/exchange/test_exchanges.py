"""All exchanges on thread ranks: dense attention, landing shapes, calls and bytes."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from heddle.attention.exchange import EXCHANGES, create_exchange
from heddle.attention.state import AttentionState
from heddle.comm.threads import ThreadGroup
from heddle.config.parallel import CommBackend
from heddle.errors import ConfigError, NumericsError
from heddle.layout.rules import validate
from tests.support.exchange_bench import VALUE_WIDTH, Case, cases, expected, run
from tests.support.layouts import degrees

MERGING = ("ag_rs", "ag_ar", "a2a")


@pytest.mark.parametrize("name", MERGING)
@given(case=cases())
@settings(max_examples=25)
def test_every_exchange_equals_dense_and_lands_on_its_owner(name, case):
    for position, merged in enumerate(run(case, name)):
        out, lse = expected(case, position)
        assert merged.out.shape == (case.rows, case.lanes, VALUE_WIDTH)
        np.testing.assert_allclose(merged.out.numpy(), out, rtol=0, atol=1e-12)
        np.testing.assert_allclose(merged.lse.numpy(), lse, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 2, 3, 2), (3, 1, 2, 2), (1, 4, 2, 1), (3, 2, 1, 1)])
@pytest.mark.parametrize("is_copy", [False, True])
def test_all_exchanges_give_equal_bits_whatever_the_order_of_arrival(shape, is_copy):
    case = Case(*shape, is_copy=is_copy, seed=11, dtype=torch.float32)
    golden = run(case, "ag_rs")
    for name in MERGING:
        for other, first in zip(run(case, name, wait=True), golden, strict=True):
            assert torch.equal(other.out, first.out)
            assert torch.equal(other.lse, first.lse)


@pytest.mark.parametrize("name", EXCHANGES)
def test_a_group_of_one_is_the_identity(name):
    case = Case(1, 1, 3, 2, is_copy=True, keys=4, dtype=torch.float32)
    generator = torch.Generator().manual_seed(2)
    state = AttentionState(
        torch.randn(3, 2, 4, generator=generator), torch.randn(3, 2, generator=generator)
    )

    def body(world):
        visible = torch.ones(1, 3, dtype=torch.bool)
        dcp = case.groups(world).dcp
        return create_exchange(name).merge(state, visible, case.place(0), dcp)

    (merged,) = ThreadGroup(1).run(body)
    assert torch.equal(merged.out, state.out)
    assert torch.equal(merged.lse, state.lse)


# One layer, n = 3 rows, h = 2 lanes, Dq = 3, Do = 2; e = 4 or 8 bytes for all of them.
# N = 4 (P' = 2, k = 2), distributed rows, by the formulas:
#   query  (N-1)*n*h*Dq*e   = 3*3*2*3*e = 54e
#   ag_rs  (N-1)*n*h*N*e    = 72e,  (N-1)*n*h*Do*e    = 36e
#   ag_ar  the same lse     = 72e,  2*(N-1)*n*h*Do*e  = 72e
#   a2a    (N-1)*n*h*(Do+1)*e = 54e
# N = 4, COPY rows: gathered rows are n, and queries cross the slice only.
#   query  (k-1)*n*h*Dq*e = 18e;  lse (N-1)*n*k*h*e = 36e
#   ag_ar  2*(3/4)*n*k*h*Do*e = 36e;  ag_rs (N-1)*n*h*Do*e = 36e;  a2a as above
DISTRIBUTED = {
    "ag_rs": [("all_gather", "dcp", 54), ("all_gather", "dcp", 72), ("reduce_scatter", "dcp", 36)],
    "ag_ar": [("all_gather", "dcp", 54), ("all_gather", "dcp", 72), ("all_reduce", "dcp", 72)],
    "a2a": [("all_gather", "dcp", 54), ("all_to_all", "dcp", 54)],
}
COPY = {
    "ag_rs": [
        ("all_gather", "slice", 18),
        ("all_gather", "dcp", 36),
        ("reduce_scatter", "dcp", 36),
    ],
    "ag_ar": [("all_gather", "slice", 18), ("all_gather", "dcp", 36), ("all_reduce", "dcp", 36)],
    "a2a": [("all_gather", "slice", 18), ("all_to_all", "dcp", 54)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("is_copy", "table"), [(False, DISTRIBUTED), (True, COPY)])
@pytest.mark.parametrize("name", MERGING)
def test_calls_and_bytes_equal_the_formulas(name, is_copy, table, dtype):
    case = Case(2, 2, 3, 2, is_copy=is_copy, dtype=dtype)
    for _, trace in run(case, name, traced=True):
        found = [(r.op, r.kind, r.bytes_received / dtype.itemsize) for r in trace.records]
        assert found == table[name]


@pytest.mark.parametrize("name", MERGING)
def test_a_poisoned_shard_fails_its_own_rows_only(name):
    case = Case(2, 2, 2, 1, is_copy=False, seed=4)
    visible = torch.ones(4, 4, dtype=torch.bool)

    def make_body(strict):
        def body(world):
            groups = case.groups(world)
            dcp = groups.dcp
            state = AttentionState(torch.ones(4, 2, 2), torch.zeros(4, 2))
            if dcp.rank == 3:
                state.lse[1] = float("-inf")  # a shard that lost the keys of gathered row 1
            place = case.place(dcp.rank)
            return create_exchange(name, strict=strict).merge(state, visible, place, dcp)

        return body

    for position, merged in enumerate(ThreadGroup(4).run(make_body(strict=False))):
        # Gathered row 1 is the second row of row block 0: positions 0 and 2.
        lost = [False, position % 2 == 0]
        assert merged.out.isnan().all(-1).all(-1).tolist() == lost
        assert merged.lse.isnan().all(-1).tolist() == lost
        assert (merged.out[0] == 1).all()
    with pytest.raises(NumericsError, match="part that saw keys"):
        ThreadGroup(4).run(make_body(strict=True))


def test_the_settings_offer_exactly_the_exchanges_that_merge():
    legal = [
        name
        for name in (*EXCHANGES, "auto", "ring")
        if validate(degrees(2, 1, 2, dcp_comm_backend=name)).legal
    ]
    assert sorted(legal) == sorted(["auto", *EXCHANGES]) == sorted(get_args(CommBackend))


def test_registry_names_and_refusal():
    assert tuple(EXCHANGES) == (*MERGING, "a2a_fine")
    for name in EXCHANGES:
        assert create_exchange(name).name == name
    with pytest.raises(ConfigError, match=r"exchange 'ring' is not known.* ag_rs, ag_ar, a2a"):
        create_exchange("ring")
