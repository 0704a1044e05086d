"""Paged attention on a CPU: this file looks at shapes, types and strides; `kernel.py` computes.

Legend: `R` rows, `Hq` lanes, `Ks` kv heads, `W` elements of a stored row, `Dv` value width.
"""

from __future__ import annotations

import math
from array import array
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from heddle.kernels.calls import call
from heddle.kernels.compiled import real_word
from heddle.kernels.paged_decode import reference
from heddle.kernels.paged_decode.kernel import ENTRIES, MAX_TILE, entry_of, room_bytes
from heddle.kernels.paged_decode.loops import MAX_LANES, VECTORS_AT_ONCE, keys_at_once
from heddle.kernels.paged_decode.plan import IntArray, PagedPlan, RowWidths
from heddle.kernels.vectors import LANES
from heddle.layout.cache_rows import RowFormat

TILE_BYTES = 48 << 10
"""Of a tile at most: it and the next lie in a core's own cache. Larger ones lose where blocks
are short, smaller ones spend more on weights.
"""
_LOG2_E = 1 / math.log(2.0)
_MAX_KEY_PARTS = 13

entry_of("float32")


def paged_decode(
    query: torch.Tensor,
    rows: torch.Tensor,
    plan: PagedPlan,
    widths: RowWidths,
    kv_head_of_lane: npt.NDArray[np.int32],
    scale: float,
    softcap: float = 0.0,
    row_format: RowFormat | None = None,
    num_threads: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference, which also serves what is wider than float32, widths that are no multiple
    of 8, pools with gaps, and codes whose parts are not those of key and value.

    Args:
        num_threads: of this rank; no effect on the result.
    """
    name = row_format.dtype if row_format is not None else str(rows.dtype).removeprefix("torch.")
    parts = _parts(row_format, widths)
    if parts is None or name not in ENTRIES or not _fits(query, rows, widths):
        return reference.paged_decode(
            query, rows, plan, widths, kv_head_of_lane, scale, softcap, row_format
        )
    num_rows, lanes, width = query.shape
    query = query.float()
    if query.stride()[1:] != (width, 1):
        query = query.contiguous()
    out, lse = torch.empty((num_rows, lanes, widths.value)), torch.empty((num_rows, lanes))
    head_bytes = rows.shape[2] * rows.element_size()
    layout = _layout(kv_head_of_lane.tobytes(), widths, rows.shape[1] * head_bytes)
    room = torch.empty(num_threads * room_bytes(lanes), dtype=torch.uint8)
    words = (
        plan.words(lanes, widths.value),
        query.data_ptr(),
        4 * query.stride(0),
        real_word(scale if softcap > 0 else scale * _LOG2_E),
        rows.data_ptr(),
        *layout.words,
        num_rows,
        lanes,
        *(widths.key, widths.value, widths.value_start),
        head_bytes,
        rows.shape[1] * head_bytes,
        parts.buffer_info()[0],
        real_word(softcap),
        out.data_ptr(),
        lse.data_ptr(),
        *layout.paces,
        room.data_ptr(),
        room_bytes(lanes),
    )
    call(entry_of(name), words, plan.num_keys * rows.shape[1] * widths.key, num_threads)
    return out, lse


def _fits(query: torch.Tensor, rows: torch.Tensor, widths: RowWidths) -> bool:
    narrow = all(width > 0 and width % LANES == 0 for width in (widths.key, widths.value))
    floats = query.dtype != torch.float64 and query.is_cpu and rows.is_cpu
    return narrow and floats and rows.is_contiguous() and query.shape[0] > 0


@cache
def _parts(row_format: RowFormat | None, widths: RowWidths) -> array[int] | None:
    """What the kernel knows of codes; None where key and value are not whole parts.

    How many parts make up the key, that of the value, the byte at which scales begin, then the
    element at which each part of the key ends.
    """
    if row_format is None or not row_format.is_quantized:
        return array("q", [0] * (3 + _MAX_KEY_PARTS))
    ends = list(accumulate(row_format.parts))
    starts = [end - width for end, width in zip(ends, row_format.parts, strict=True)]
    if widths.key not in ends or widths.value_start not in starts:
        return None
    in_key, of_value = ends.index(widths.key) + 1, starts.index(widths.value_start)
    narrow = all(width % LANES == 0 for width in row_format.parts[:in_key])
    if in_key > _MAX_KEY_PARTS or not narrow or row_format.parts[of_value] < widths.value:
        return None
    key_ends = ends[:in_key] + [0] * (_MAX_KEY_PARTS - in_key)
    return array("q", [in_key, of_value, ends[-1], *key_ends])


class _Layout(NamedTuple):
    """What follows from lanes and widths alone."""

    groups: IntArray
    """`[G, 3]`: kv head, first lane, number of lanes, at most 4."""
    heads: npt.NDArray[np.int32]
    words: tuple[int, int, int]
    """Where groups are, how many, and where heads are."""
    paces: tuple[int, int, int]
    """Keys of a tile, and bytes that are asked for in a step of either product."""


@cache
def _layout(heads: bytes, widths: RowWidths, row_bytes: int) -> _Layout:
    """Groups of neighbouring lanes of one kv head; a step of a product is `loops.py`'s."""
    kv_heads = np.frombuffer(heads, np.int32)
    groups: list[tuple[int, int, int]] = []
    for lane, head in enumerate(kv_heads.tolist()):
        known, start, count = groups[-1] if groups else (-1, 0, 0)
        if head >= 0 and known == head and start + count == lane and count < MAX_LANES:
            groups[-1] = (head, start, count + 1)
        elif head >= 0:
            groups.append((head, lane, 1))
    table = np.array(groups, np.int64).reshape(-1, 3)
    steps = sum(widths.key / (2 * LANES) / keys_at_once(count) for _, _, count in groups)
    value_steps = sum(widths.value / (LANES * VECTORS_AT_ONCE[count]) for _, _, count in groups)
    tile = min(MAX_TILE, 1 << max(LANES, TILE_BYTES // row_bytes).bit_length() - 1)
    each = row_bytes / 2  # of a key, in each of the products
    paces = [math.ceil(each / max(1.0, count)) for count in (steps, value_steps)]
    words = (table.ctypes.data, len(table), kv_heads.ctypes.data)
    return _Layout(table, kv_heads, words, (tile, paces[0], paces[1]))
