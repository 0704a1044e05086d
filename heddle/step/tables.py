"""Block ids under the new rows of a step, for all requests at once.

A context of a million tokens has thousands of blocks, and a decode row touches one of them: what a
step writes is looked up in a short list.

    table of a request    3 9 4 | 7 2 |        C = 11, q = 3, V = 4: the rows 11, 12, 13
    kept                    [4 | 7]

Legend: `C` cached tokens and `q` new rows of a request, `B` requests, `V` virtual block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from heddle.step.batch import ScheduledRequest
from heddle.step.packed import packed_part, unpack_table

IntArray = npt.NDArray[np.int64]


def touched_blocks(
    requests: Sequence[ScheduledRequest], group: int, unit: int
) -> tuple[IntArray, IntArray]:
    """Ids of the blocks that hold new rows, one request after another.

    Args:
        requests: of the step.
        group: index of the cache group.
        unit: `V`.
    Returns:
        The ids, and `[B]` offsets: a position of request b lies in block
        `ids[offsets[b] + position // V]`.
    Example:
        >>> from heddle.step.packed import pack_table
        >>> request = ScheduledRequest(
        ...     request_id=0, token_ids=(5, 6, 7), num_computed_tokens=11,
        ...     packed_tables=(pack_table([3, 9, 4, 7, 2]),), layout_fingerprint=0)
        >>> ids, offsets = touched_blocks([request, request], group=0, unit=4)
        >>> ids.tolist(), ids[offsets + 13 // 4].tolist()
        ([4, 7, 4, 7], [7, 7])
    """
    pieces: list[bytes] = []
    offsets: list[int] = []
    count = 0
    for request in requests:
        first = request.num_computed_tokens // unit
        last = (request.num_computed_tokens + len(request.token_ids) - 1) // unit
        offsets.append(count - first)
        if request.token_ids:
            pieces.append(packed_part(request.packed_tables[group], first, last + 1))
            count += last + 1 - first
    return unpack_table(b"".join(pieces)), np.array(offsets, dtype=np.int64)
