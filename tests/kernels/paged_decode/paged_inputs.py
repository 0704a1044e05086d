"""Pools with blocks in random order, NaN in every slot that no row meets, and uneven heads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from heddle.kernels.paged_decode.plan import PagedPlan, RowWidths
from heddle.kernels.paged_decode.reference import paged_decode
from heddle.layout.cache_rows import RowFormat
from tests.kernels.bounds import assert_as_close

# Lanes and the kv head that each reads: even and uneven groups, pad lanes, more lanes than a tile
# has rows, a kv head that nobody reads, no head at all.
HEAD_MAPS = {
    "even": ([0, 0, 1, 1], 2),
    "uneven": ([0, 0, 0, 1, 2, 2, -1], 3),
    "pads inside": ([1, -1, 0, 0, -1], 2),
    "one for many": ([0] * 18, 1),
    "unread": ([2, 2], 3),
    "none": ([-1, -1], 1),
}
GQA = RowWidths(16, 16, 16)
ODD = RowWidths(20, 20, 12)
LATENT = RowWidths(40, 0, 32)
"""A latent of 32 that is the value, and a rotary key of 8."""


@dataclass(frozen=True)
class Case:
    """Arguments of `paged_decode`, and the slots that some row meets."""

    query: torch.Tensor
    rows: torch.Tensor
    plan: PagedPlan
    widths: RowWidths
    heads: np.ndarray
    scale: float = 0.3

    def arguments(self, device):
        return (
            self.query.to(device),
            self.rows.to(device),
            self.plan,
            self.widths,
            self.heads,
            self.scale,
        )

    def oracle(self, softcap=0.0, rows=None):
        """In float64, of the numbers that are stored."""
        rows = self.rows if rows is None else rows
        wide = (self.query.double(), rows.double())
        return paged_decode(*wide, self.plan, self.widths, self.heads, self.scale, softcap)

    @property
    def met(self):
        """Slots that some row meets."""
        slots = set()
        for row, table in enumerate(self.plan.table_of_row):
            for local in range(self.plan.first[row], self.plan.end[row]):
                block = self.plan.block_tables[table, local // self.plan.block_size]
                slots.add(int(block * self.plan.block_size + local % self.plan.block_size))
        return sorted(slots)


def make_case(
    lengths,
    *,
    firsts=None,
    head_map="uneven",
    widths=GQA,
    block_size=8,
    dtype=torch.float32,
    query_dtype=None,
    seed=0,
    scale=0.3,
):
    """Row i meets [firsts[i], lengths[i]) of one of the sequences; two rows may share one."""
    generator = torch.Generator().manual_seed(seed)
    heads, num_kv = HEAD_MAPS[head_map]
    num_rows = len(lengths)
    num_tables = max(1, num_rows - 1)
    most = max([-(-length // block_size) for length in lengths] + [1])
    num_blocks = num_tables * most + 2
    order = torch.randperm(num_blocks - 1, generator=generator)[: num_tables * most] + 1
    stored = max(widths.key, widths.value_start + widths.value)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    plan = PagedPlan(
        block_tables=order.view(num_tables, most).numpy(),
        table_of_row=np.arange(num_rows) % num_tables,
        first=np.array(firsts or [0] * num_rows, dtype=np.int64),
        end=np.array(lengths, dtype=np.int64),
        block_size=block_size,
    )
    query = draw(num_rows, len(heads), widths.key).to(query_dtype or dtype)
    rows = draw(num_blocks * block_size, num_kv, stored).to(dtype)
    case = Case(query, rows, plan, widths, np.array(heads, dtype=np.int32), scale)
    unseen = torch.ones(len(rows), dtype=torch.bool)
    unseen[case.met] = False
    rows[unseen] = math.nan
    return case


def format_of(widths, dtype):
    """The format of quantised rows with a part for key and value, or for latent and rotary."""
    if widths.value_start:
        return RowFormat(dtype, (widths.key, widths.value))
    return RowFormat(dtype, (widths.value, widths.key - widths.value))


def run(case, device, softcap=0.0, **options):
    from heddle.kernels.paged_decode import triton_gpu  # imports triton

    found = triton_gpu.paged_decode(*case.arguments(device), softcap, **options)
    return tuple(part.cpu() for part in found)


def check(case, found, softcap=0.0, rows=None):
    """At most twice the error of a float32 softmax, and a rounding step; nil stays exact."""
    rows = case.rows if rows is None else rows
    exact = case.oracle(softcap, rows)
    plain = paged_decode(
        case.query.float(), rows.float(), case.plan, case.widths, case.heads, case.scale, softcap
    )
    nil = exact[1] == -math.inf
    assert (found[0][nil] == 0).all()
    assert (found[1][nil] == -math.inf).all()
    for one, other, right in zip(found, plain, exact, strict=True):
        assert_as_close(one[~nil], other[~nil], right[~nil])
