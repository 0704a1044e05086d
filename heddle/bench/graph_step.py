"""A decode step over Triton's kernels on one device, for what a captured graph saves.

    norm - products - write - paged attention - product - norm - gate - product      per layer

Layers are plain and weights random: what counts is how many launches there are, and their sizes.

Legend: `R` rows, `E` hidden size, `Hq` heads, `Ks` kv heads, `D` head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from heddle.kernels.cache_write import triton_gpu as write
from heddle.kernels.paged_decode import triton_gpu as decode
from heddle.kernels.paged_decode.plan import PagedPlan, RowWidths
from heddle.kernels.paged_decode.triton_plan import LaneGroups
from heddle.kernels.recording.plan_buffers import PlanBuffers
from heddle.kernels.rms_norm.reference import add_rms_norm, rms_norm
from heddle.kernels.silu_mul.reference import silu_mul
from heddle.units import PAD_SLOT_ID

BLOCK_SIZE = 16
_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Sizes of a model, and of what a step may meet."""

    num_layers: int
    hidden: int
    """`E`."""
    inner: int
    heads: int
    """`Hq`, a multiple of `kv_heads`."""
    kv_heads: int
    width: int
    """`D`."""
    max_rows: int
    """Sequences of the pool, each with blocks of its own."""
    max_blocks: int
    """Of a sequence."""


class DecodeStep:
    """Layers with their caches, and the plan of the step at hand.

    Args:
        shape: sizes.
        device: of everything.
        dtype: of weights, rows and caches.
    """

    def __init__(self, shape: StepShape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        self._generator = torch.Generator(device).manual_seed(0)
        self._device, self._dtype = device, dtype
        widths = RowWidths(shape.width, shape.width, shape.width)
        self._form = decode.LayerForm(widths, shape.width**-0.5)
        heads = np.arange(shape.heads, dtype=np.int32) // (shape.heads // shape.kv_heads)
        self._groups = LaneGroups.of(heads, decode.max_lanes(widths), device)
        self._layers = [self._layer() for _ in range(shape.num_layers)]
        num_blocks = 1 + shape.max_rows * shape.max_blocks
        pool = (num_blocks * BLOCK_SIZE, shape.kv_heads, 2 * shape.width)
        self.pools = [self._draw(*pool) for _ in range(shape.num_layers)]
        order = 1 + np.random.default_rng(0).permutation(num_blocks - 1)
        self._tables = order.reshape(shape.max_rows, shape.max_blocks)
        self._plans: dict[int, PlanBuffers] = {}

    def _draw(self, *shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, device=self._device, generator=self._generator)
        return drawn.to(self._dtype)

    def _layer(self) -> tuple[torch.Tensor, ...]:
        """Products as `[inputs, outputs]`, scaled so that rows keep their size."""
        shape = self.shape
        inside = shape.heads * shape.width
        sizes = (
            (shape.hidden, inside + 2 * shape.kv_heads * shape.width),
            (inside, shape.hidden),
            (shape.hidden, 2 * shape.inner),
            (shape.inner, shape.hidden),
        )
        return tuple(self._draw(*size) * size[0] ** -0.5 for size in sizes)

    def plan(self, lengths: Sequence[int], num_rows: int) -> torch.Tensor:
        """Say who decodes in the next step; `[num_rows]`: where each new row is stored.

        Args:
            lengths: context of each sequence, the new row included.
            num_rows: rows of the step, pads included; steps of one count share their buffers.
        """
        count = len(lengths)
        end = np.array(lengths, dtype=np.int64)
        tables = self._tables[:count]
        if num_rows not in self._plans:
            room = (num_rows, self.shape.max_blocks, BLOCK_SIZE)
            self._plans[num_rows] = PlanBuffers(*room, self._device)
        first = np.zeros(count, dtype=np.int64)
        self._plans[num_rows].take(PagedPlan(tables, np.arange(count), first, end, BLOCK_SIZE))
        slots = np.full(num_rows, PAD_SLOT_ID, dtype=np.int64)
        last = end - 1
        blocks = tables[np.arange(count), last // BLOCK_SIZE]
        slots[:count] = blocks * BLOCK_SIZE + last % BLOCK_SIZE
        return torch.from_numpy(slots).to(self._device)

    def compute(self, hidden: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """`[R, E]` -> `[R, E]`; launches only, so that a device can capture it.

        Args:
            hidden: `[R, E]`; not modified.
            slots: `[R]`, from `plan`.
        """
        one = hidden.new_ones(self.shape.hidden)
        hidden = hidden.clone()
        update = torch.zeros_like(hidden)
        for pool, (inward, outward, gate_up, down) in zip(self.pools, self._layers, strict=True):
            rows = add_rms_norm(hidden, update, one, _EPS) @ inward
            update = self._attend(rows, pool, slots) @ outward
            update = silu_mul(add_rms_norm(hidden, update, one, _EPS) @ gate_up) @ down
        return rms_norm(hidden.add_(update), one, _EPS)

    def _attend(self, rows: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values side by side -> `[R, Hq * D]`."""
        shape = self.shape
        inside, num_rows = shape.heads * shape.width, len(rows)
        query = rows[:, :inside].view(num_rows, shape.heads, shape.width)
        new = rows[:, inside:].view(num_rows, 2, shape.kv_heads, shape.width)
        write.write(pool, slots, new.transpose(1, 2).reshape(num_rows, shape.kv_heads, -1))
        plan = self._plans[num_rows].plan
        out, _ = decode.attend(query, pool, plan, self._groups, self._form)
        return out.to(rows.dtype).reshape(num_rows, inside)
