"""All exchanges on thread ranks: dense attention, landing shapes, calls and bytes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.attention.exchange import EXCHANGES, create_exchange
from heddle.attention.exchange.base import gather_query
from heddle.attention.exchange.placement import Placement
from heddle.attention.state import AttentionState
from heddle.comm.threads import ThreadGroup
from heddle.comm.tracing import TracingWorld
from heddle.config.parallel import CommBackend
from heddle.errors import ConfigError, NumericsError
from heddle.layout.rules import validate
from tests.support.layouts import degrees
from tests.support.oracle import dense_row

MERGING = ("ag_rs", "ag_ar", "a2a")
WIDTH, VALUE_WIDTH = 3, 2


@dataclass(frozen=True)
class Case:
    """Queries of every rank, keys of every rank, and who sees what."""

    replicas: int
    slice_size: int
    rows: int
    lanes: int
    is_copy: bool
    seed: int = 0
    used: tuple[bool, ...] | None = None
    dtype: torch.dtype = torch.float64
    keys: int = 5

    @property
    def size(self):
        return self.replicas * self.slice_size

    def place(self, position):
        return Placement(
            num_replicas=self.replicas,
            slice_size=self.slice_size,
            num_rows=self.rows,
            lanes=self.lanes,
            is_copy=self.is_copy,
            position=position,
            used_lanes=self.used,
        )

    def tensors(self):
        generator = np.random.default_rng(self.seed)
        query = generator.standard_normal((self.size, self.rows, self.lanes, WIDTH))
        if self.is_copy:
            query = query[np.arange(self.size) // self.replicas * self.replicas]
        key = generator.standard_normal((self.size, self.keys, WIDTH))
        value = generator.standard_normal((self.size, self.keys, VALUE_WIDTH))
        rows = self.place(0).gathered_rows
        # How many keys of each rank a gathered row sees: often none.
        counts = generator.integers(0, self.keys + 1, (self.size, rows))
        counts *= generator.random((self.size, rows)) < 0.6
        return query, key, value, counts

    def groups(self, world):
        dcp = world.group("dcp", [range(self.size)])
        slices = [range(c, self.size, self.replicas) for c in range(self.replicas)]
        return dcp, world.group("slice", slices)

    def is_used(self, lane):
        return self.used is None or self.used[lane]


def partial_state(case, gathered, key, value, counts):
    """One rank's partial by the oracle; rows without keys and pad lanes hold garbage, or nil."""
    rows, lanes = gathered.shape[:2]
    out = np.full((rows, lanes, VALUE_WIDTH), np.nan)
    lse = np.full((rows, lanes), [np.nan, np.inf, -np.inf][case.seed % 3])
    for row in range(rows):
        for lane in range(lanes):
            if not case.is_used(lane):
                out[row, lane], lse[row, lane] = 0.0, -np.inf
            elif counts[row]:
                seen = slice(0, counts[row])
                out[row, lane], lse[row, lane] = dense_row(
                    gathered[row, lane].numpy(), key[seen], value[seen], 1.0
                )
    dtype = case.dtype
    return AttentionState(torch.from_numpy(out).to(dtype), torch.from_numpy(lse).to(dtype))


def expected(case, position):
    """Dense attention of one rank's own queries over the keys of all ranks."""
    query, key, value, counts = case.tensors()
    place = case.place(position)
    head_block, row_block = divmod(position, case.replicas)
    out = np.zeros((case.rows, case.lanes, VALUE_WIDTH))
    lse = np.full((case.rows, case.lanes), -np.inf)
    for row in range(case.rows):
        number = row if place.is_copy else row_block * case.rows + row
        seen = [slice(0, counts[source, number]) for source in range(case.size)]
        keys = np.concatenate([key[source, some] for source, some in enumerate(seen)])
        values = np.concatenate([value[source, some] for source, some in enumerate(seen)])
        for lane in range(case.lanes):
            if case.is_used(head_block * case.lanes + lane):
                own = query[position, row, lane]
                out[row, lane], lse[row, lane] = dense_row(own, keys, values, 1.0)
    return out, lse


def run(case, name, *, strict=True, traced=False, wait=False):
    query, key, value, counts = case.tensors()
    visible = torch.from_numpy(counts > 0)

    def body(thread_world):
        world = TracingWorld(thread_world)
        dcp, slice_group = case.groups(world)
        rank = dcp.rank
        if wait:
            time.sleep(0.01 * ((rank * 7 + case.seed) % case.size))
        place = case.place(rank)
        own = torch.from_numpy(query[rank]).to(case.dtype)
        gathered = gather_query(own, place, dcp, slice_group)
        assert gathered.shape == (place.gathered_rows, place.gathered_lanes, WIDTH)
        state = partial_state(case, gathered.double(), key[rank], value[rank], counts[rank])
        merged = create_exchange(name, strict=strict).merge(state, visible, place, dcp)
        return (merged, world.trace) if traced else merged

    return ThreadGroup(case.size, timeout_seconds=20).run(body)


@st.composite
def cases(draw):
    replicas, slice_size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    lanes = draw(st.integers(1, 2))
    used = None
    if draw(st.booleans()):
        total = slice_size * lanes
        used = tuple(draw(st.lists(st.booleans(), min_size=total, max_size=total)))
    return Case(
        replicas=replicas,
        slice_size=slice_size,
        rows=draw(st.integers(0, 3)),
        lanes=lanes,
        is_copy=draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
        used=used,
    )


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
    case = Case(1, 1, 3, 2, is_copy=False, keys=4, dtype=torch.float32)
    generator = torch.Generator().manual_seed(2)
    state = AttentionState(
        torch.randn(3, 2, 4, generator=generator), torch.randn(3, 2, generator=generator)
    )

    def body(world):
        visible = torch.ones(1, 3, dtype=torch.bool)
        dcp, _ = case.groups(world)
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


def test_copy_rows_of_a_slice_of_one_gather_no_queries():
    case = Case(3, 1, 2, 2, is_copy=True)
    for _, trace in run(case, "ag_ar", traced=True):
        assert [record.op for record in trace.records] == ["all_gather", "all_reduce"]


@pytest.mark.parametrize("name", MERGING)
def test_a_poisoned_shard_fails_its_own_rows_only(name):
    case = Case(2, 2, 2, 1, is_copy=False, seed=4)
    visible = torch.ones(4, 4, dtype=torch.bool)

    def make_body(strict):
        def body(world):
            dcp, _ = case.groups(world)
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
    assert sorted(legal) == sorted(["auto", *MERGING]) == sorted(get_args(CommBackend))


def test_registry_names_and_refusal():
    assert tuple(EXCHANGES) == MERGING
    for name in EXCHANGES:
        assert create_exchange(name).name == name
    with pytest.raises(ConfigError, match=r"exchange 'ring' is not known.* ag_rs, ag_ar, a2a"):
        create_exchange("ring")
