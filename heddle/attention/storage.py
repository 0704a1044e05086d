"""KV rows of one rank: pool tensors addressed by slot.

A stored row holds key and value of one kv head side by side (GQA), or the latent row that serves as
both (MLA), so one write and one gather move both:

    layer[slot, head] = | key: D | value: D |        or        | latent: 512 | rotary key: 64 |

A codec says how such a row is kept (`heddle.attention.row_codec`): as elements of some type, or as
bytes with their scales. Rows are copied, gathered and sent as they are kept, and decoded where
queries meet them.

Layer j of every cache group lives in tensor j: a block id belongs to one group at a time, so layers
of different groups never meet in a page (`heddle.layout.cache_groups`).

Slots come from the layout (`KVLayout.slots`), reads go by local index through a block table: local
index l of a sequence lies in block `table[l // block_size]`, row `l % block_size`.

Legend: `Ks` stored kv heads, `W` elements of a row, `W'` elements of a stored row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from heddle.attention.row_codec import RowCodec
from heddle.kernels.registry import Kernels
from heddle.kvcache.copies import BlockCopy
from heddle.layout.kv import KVLayout
from heddle.step.views import LocalRange
from heddle.units import PAD_SLOT_ID


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Slots of consecutive local indices: one run, which reads as a view, or a list."""

    start: int
    end: int
    index: torch.Tensor | None
    """None when the slots are the run [start, end)."""

    def __len__(self) -> int:
        return self.end - self.start if self.index is None else len(self.index)


@dataclass(frozen=True, slots=True)
class SlotWrite:
    """Which of the rows that this rank sees are stored, and where."""

    mapping: torch.Tensor
    """`[R]`: the slot of each row, -1 for rows that this rank does not store."""
    slots: torch.Tensor
    """Of the rows that are stored."""
    rows: torch.Tensor | None
    """None when every row is stored."""

    @classmethod
    def of(cls, slot_mapping: npt.NDArray[np.int64], num_slots: int) -> SlotWrite:
        """Split a slot mapping once per step.

        Args:
            slot_mapping: `[R]`; -1 marks rows that this rank does not store.
            num_slots: of the pool.

        Raises:
            IndexError: a slot lies outside the pool; compiled writes look no more.
        """
        if len(slot_mapping) and not -1 <= slot_mapping.min() <= slot_mapping.max() < num_slots:
            raise IndexError(
                f"slots {slot_mapping.min()} to {slot_mapping.max()} are not in [-1, {num_slots})"
            )
        rows = np.flatnonzero(slot_mapping != PAD_SLOT_ID)
        whole = len(rows) == len(slot_mapping)
        mapping = torch.tensor(slot_mapping)
        if whole:
            return cls(mapping, mapping, None)
        return cls(mapping, torch.tensor(slot_mapping[rows]), torch.tensor(rows))


class KVStore:
    """The KV tensors of one rank."""

    def __init__(
        self,
        *,
        tensor_of_layer: Mapping[int, int],
        num_blocks: int,
        block_size: int,
        num_heads: int,
        codec: RowCodec,
        device: torch.device,
        kernels: Kernels | None = None,
    ) -> None:
        """Allocate.

        Args:
            tensor_of_layer: pool tensor of each attention layer of this rank's stage.
            num_blocks: of the pool, block 0 included.
            block_size: rows of a block.
            num_heads: `Ks`.
            codec: how a row is kept.
            device: of the tensors.
            kernels: who writes; None: torch.
        """
        # Torch picks rows once per step, which costs it less than to look at slots in each layer.
        is_compiled = kernels is not None and kernels.name != "torch"
        self._write = kernels.cache_write if kernels is not None and is_compiled else None
        self.block_size = block_size
        self.codec = codec
        self._tensor_of_layer = dict(tensor_of_layer)
        num_tensors = max(self._tensor_of_layer.values(), default=-1) + 1
        self._num_slots = num_blocks * block_size
        shape = (self._num_slots, num_heads, codec.width)
        # Never touched pages stay uncommitted, so a large pool costs only what is written.
        self.tensors = [
            torch.empty(shape, dtype=codec.element, device=device) for _ in range(num_tensors)
        ]

    @property
    def num_slots(self) -> int:
        """Of every layer."""
        return self._num_slots

    def layer(self, layer: int) -> torch.Tensor:
        """`[slots, Ks, W']`: the tensor in which a layer's rows lie."""
        return self.tensors[self._tensor_of_layer[layer]]

    def locate(self, keys: LocalRange) -> SlotRange:
        """Slots of a range of local indices, found once per step and used by every layer."""
        if keys.start >= keys.end:
            return SlotRange(0, 0, None)
        if keys.picked is not None:
            index = keys.start + keys.picked
            slots = keys.block_table[index // self.block_size] * self.block_size
            return SlotRange(0, 0, torch.tensor(slots + index % self.block_size))
        first_block = keys.start // self.block_size
        last_block = (keys.end - 1) // self.block_size
        blocks = keys.block_table[first_block : last_block + 1]
        offset = keys.start - first_block * self.block_size
        length = keys.end - keys.start
        if len(blocks) == 1 or bool((np.diff(blocks) == 1).all()):
            start = int(blocks[0]) * self.block_size + offset
            return SlotRange(start, start + length, None)
        slots = (blocks[:, None] * self.block_size + np.arange(self.block_size)).reshape(-1)
        return SlotRange(0, 0, torch.tensor(slots[offset : offset + length].copy()))

    def read(self, layer: int, slots: SlotRange) -> torch.Tensor:
        """`[L, Ks, W']` as stored: a view where the slots are one run, else a copy."""
        rows = self.layer(layer)
        if slots.index is None:
            return rows[slots.start : slots.end]
        return rows.index_select(0, slots.index)

    def keys(self, layer: int, slots: SlotRange, dtype: torch.dtype) -> torch.Tensor:
        """`[L, Ks, W]`: the same in a compute type."""
        return self.codec.decode(self.read(layer, slots), dtype)

    def write(self, layer: int, write: SlotWrite, rows: torch.Tensor) -> None:
        """Store the rows that belong here.

        Args:
            layer: index of the layer.
            write: from `SlotWrite.of`.
            rows: `[R, Ks, W']`, every row this rank sees in the step, encoded.
        """
        if self._write is not None:
            self._write(self.layer(layer), write.mapping, rows)
            return
        if len(write.slots) == 0:
            return
        kept = rows if write.rows is None else rows.index_select(0, write.rows)
        self.layer(layer).index_copy_(0, write.slots, kept)

    def copy_blocks(
        self, copies: Sequence[BlockCopy], places: Sequence[tuple[KVLayout, int]]
    ) -> None:
        """Copy-on-write: this rank's share of each partly shared virtual block.

        Args:
            copies: no source is a target, so their order has no effect.
            places: for each copy, the layout of its chain and this rank's place in it.
        """
        for copy, (layout, place) in zip(copies, places, strict=True):
            first, last = layout.local_range(copy.start, copy.end, place)
            source = copy.source_block * self.block_size
            target = copy.target_block * self.block_size
            for rows in self.tensors:
                rows[target : target + last - first] = rows[source : source + last - first]

    def wipe(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks with zeros, after a request that produced NaN."""
        for block in blocks:
            start = block * self.block_size
            for rows in self.tensors:
                rows[start : start + self.block_size] = 0

    def spoil(self, blocks: Sequence[int]) -> None:
        """Fill blocks that nobody owns with NaN, or where rows are bytes with the largest one: who
        reads them by mistake fails.
        """
        for block in blocks:
            start = block * self.block_size
            for rows in self.tensors:
                worst = math.nan if rows.is_floating_point() else torch.iinfo(rows.dtype).max
                rows[start : start + self.block_size] = worst
