"""Many rows of few sequences over a pool with blocks in random order; NaN where nobody reads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from heddle.kernels.paged_decode.plan import PagedPlan, RowWidths
from heddle.kernels.paged_decode.reference import paged_decode

# Lanes and the kv head that each reads.
HEAD_MAPS = {
    "even": [0, 0, 0, 1, 1, 1],
    "uneven": [0, 0, 0, 0, 0, 2, 2, -1],
    "shuffled": [1, -1, 0, 1, 0, 2, 1],
    "one for many": [0] * 20,
    "one for one": [0, 1],
    "none": [-1, -1],
}
GQA = RowWidths(24, 24, 24)
WIDE = RowWidths(64, 64, 64)
LATENT = RowWidths(40, 0, 32)
"""A latent of 32 that is the value, and a rotary key of 8."""
PATTERNS = {
    "causal": lambda rows, context: [(0, context + i + 1) for i in range(rows)],
    "window": lambda rows, context: [
        (max(0, context + i - 10), context + i + 1) for i in range(rows)
    ],
    "context": lambda rows, context: [(0, context)] * rows,
    "islands": lambda rows, context: [(i * 7 % 50, i * 7 % 50 + i % 4) for i in range(rows)],
    "none": lambda rows, context: [(5, 5)] * rows,
}


@dataclass(frozen=True)
class Case:
    """Arguments of `paged_attention`."""

    query: torch.Tensor
    rows: torch.Tensor
    plan: PagedPlan
    widths: RowWidths
    heads: np.ndarray
    scale: float
    softcap: float = 0.0

    def arguments(self, dtype=None, rows=None):
        query, rows = self.query, self.rows if rows is None else rows
        if dtype is not None:
            query, rows = query.to(dtype), rows.to(dtype)
        return query, rows, self.plan, self.widths, self.heads, self.scale, self.softcap

    @property
    def met(self):
        """Whether some row meets a slot."""
        slots = torch.zeros(len(self.rows), dtype=torch.bool)
        plan = self.plan
        for table, first, end in zip(plan.table_of_row, plan.first, plan.end, strict=True):
            local = np.arange(first, end)
            blocks = plan.block_tables[table, local // plan.block_size]
            slots[torch.from_numpy(blocks * plan.block_size + local % plan.block_size)] = True
        return slots


def make_case(
    sequences,
    *,
    head_map="even",
    widths=GQA,
    block_size=16,
    seed=0,
    scale=0.25,
    softcap=0.0,
):
    """A case of sequences, each (pattern, number of rows, context)."""
    generator = torch.Generator().manual_seed(seed)
    heads = np.array(HEAD_MAPS[head_map], dtype=np.int32)
    ranges = [PATTERNS[pattern](rows, context) for pattern, rows, context in sequences]
    most = max([end for each in ranges for _, end in each] + [1])
    blocks = -(-most // block_size)
    order = torch.randperm(len(sequences) * blocks + 1, generator=generator)[:-1]
    plan = PagedPlan(
        block_tables=order.view(len(sequences), blocks).numpy(),
        table_of_row=np.repeat(np.arange(len(sequences)), [len(each) for each in ranges]),
        first=np.array([first for each in ranges for first, _ in each], dtype=np.int64),
        end=np.array([end for each in ranges for _, end in each], dtype=np.int64),
        block_size=block_size,
    )
    width = max(widths.key, widths.value_start + widths.value)
    shape = (len(order) + 1) * block_size, max(HEAD_MAPS[head_map]) + 2, width
    query = torch.randn(len(plan.first), len(heads), widths.key, generator=generator)
    rows = torch.randn(shape, generator=generator)
    case = Case(query, rows, plan, widths, heads, scale, softcap)
    rows[~case.met] = math.nan
    return case


def check(case, found, stored=None):
    """At most twice the error of plain torch in float32, and a rounding step; nil is exact."""
    stored = case.rows if stored is None else stored
    exact = paged_decode(*case.arguments(torch.float64, stored))
    plain = paged_decode(*case.arguments(torch.float32, stored))
    nil = exact[1] == -math.inf
    assert (found[0][nil] == 0).all()
    assert (found[1][nil] == -math.inf).all()
    for one, other, right in zip(found, plain, exact, strict=True):
        assert one.dtype == torch.float32
        one, other, right = one[~nil].double(), other[~nil].double(), right[~nil]
        if right.numel() > 0:
            step = torch.finfo(torch.float32).eps * right.abs().max()
            assert (one - right).abs().max() <= 2 * (other - right).abs().max() + step
