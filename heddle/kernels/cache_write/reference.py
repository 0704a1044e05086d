"""What a cache write means, in plain torch: rows go to their slots, rounded once to its type.

Legend: `R` rows that this rank sees, `Ks` stored kv heads, `W` elements of a stored row.
"""

from __future__ import annotations

import torch

from heddle.units import PAD_SLOT_ID


def write(pool: torch.Tensor, slot_mapping: torch.Tensor, rows: torch.Tensor) -> None:
    """Store the rows that belong here.

    Args:
        pool: `[slots, Ks, W]`, contiguous; changed in place.
        slot_mapping: `[R]` int64, the slot of each row, -1 for rows that are not stored here;
            slots differ from each other.
        rows: `[R, Ks, W]`, of the type of the pool or, for a pool of floats, another float type.
    """
    kept = slot_mapping != PAD_SLOT_ID
    pool[slot_mapping[kept]] = rows[kept].to(pool.dtype)
