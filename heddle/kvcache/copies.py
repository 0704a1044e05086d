"""Copy-on-write of a partly shared virtual block, as plain data."""

from __future__ import annotations

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
