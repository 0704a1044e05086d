"""One exchange on thread ranks: queries, keys and partial states by the oracle."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from heddle.attention.exchange import create_exchange
from heddle.attention.exchange.base import gather_query
from heddle.attention.exchange.placement import Placement
from heddle.attention.state import AttentionState
from heddle.comm.base import RankGroups
from heddle.comm.solo import SoloCommunicator
from heddle.comm.threads import ThreadGroup
from heddle.comm.tracing import TracingWorld
from tests.support.oracle import dense_row

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
    replicates: bool = False

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
            has_slice_queries=self.replicates,
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
        """Position r is PCP rank `r % P'` of head block `r // P'`."""
        solo, count = SoloCommunicator(), self.replicas
        slices = [range(c, self.size, count) for c in range(count)]
        replicas = [range(start, start + count) for start in range(0, self.size, count)]
        return RankGroups(
            tp=solo,
            pcp=world.group("pcp", replicas),
            dcp=world.group("dcp", [range(self.size)]),
            slice=world.group("slice", slices),
            pp=solo,
            ep=solo,
        )

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


def run(case, name, *, strict=True, traced=False, wait=False, keeps_lse=True, kernels=None):
    query, key, value, counts = case.tensors()
    visible = torch.from_numpy(counts > 0)

    def body(thread_world):
        world = TracingWorld(thread_world)
        groups = case.groups(world)
        dcp, rank = groups.dcp, groups.dcp.rank
        if wait:
            time.sleep(0.01 * ((rank * 7 + case.seed) % case.size))
        place = case.place(rank)
        own = torch.from_numpy(query[rank]).to(case.dtype)
        if case.replicates:  # this rank has projected the queries of its whole slice
            first = rank % case.replicas
            blocks = query[first :: case.replicas]
            own = torch.from_numpy(np.concatenate(list(blocks), axis=1)).to(case.dtype)
        gathered = gather_query(own, place, groups)
        assert gathered.shape == (place.gathered_rows, place.gathered_lanes, WIDTH)
        state = partial_state(case, gathered.double(), key[rank], value[rank], counts[rank])
        exchange = create_exchange(
            name, groups.pcp, keeps_lse=keeps_lse, strict=strict, kernels=kernels
        )
        merged = exchange.merge(state, visible, place, dcp)
        return (merged, world.trace) if traced else merged

    return ThreadGroup(case.size).run(body)


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
        replicates=draw(st.booleans()),
    )
