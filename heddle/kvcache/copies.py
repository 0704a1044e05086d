"""What ranks do to their storage before the first write of a step, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class BlockCopy(msgspec.Struct, frozen=True, kw_only=True):
    """Rows [start, end) of one virtual block are copied to another before any write of the step.

    Rank r copies `layout.local_len(end, r) - layout.local_len(start, r)` rows from the top of its
    page of `source_block` to the top of its page of `target_block`; nothing travels between ranks.
    """

    source_block: int
    target_block: int
    start: int
    """First global position of the block; a multiple of the virtual block size."""
    end: int
    """First global position that is not copied; start < end <= start + virtual block size."""
    start_rank: int = 0
    """`u` of the block chain."""
    group: int = 0
    """Cache group of the chain; its layout says which rows a rank copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEdits:
    """Told once, carried by the next step: first the wipes, then the copies, then the states."""

    copies: tuple[BlockCopy, ...] = ()
    """No source is a target; sources are let go when the step has ended."""
    wiped_blocks: tuple[int, ...] = ()
    """Blocks to overwrite with zeros."""
    state_copies: tuple[tuple[int, int], ...] = ()
    """(source slot, target slot) of recurrent states, done in this order."""
