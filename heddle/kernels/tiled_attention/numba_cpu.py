"""Attention of many rows on a CPU, from register tiles, near the rate of a matrix product.

This file looks at shapes, types and strides, once; `kernel.py` computes and `plan.py` says how the
work is cut.

Legend: `R` rows, `Hq` lanes, `Ks` kv heads, `W` elements of a stored row, `L` keys, `Dq`, `Dv` key
and value width.
"""

from __future__ import annotations

from array import array
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from heddle.kernels.compiled import real_word
from heddle.kernels.paged_decode.plan import PagedPlan, RowWidths
from heddle.kernels.threads import launch
from heddle.kernels.tiled_attention import kernel, reference, words
from heddle.kernels.tiled_attention.panels import WIDTH
from heddle.kernels.tiled_attention.plan import MERGE_WORDS, UNIT_WORDS, work_of
from heddle.kernels.tiled_attention.tiles import ELEMENTS, GAP, MAX_PARTS
from heddle.kernels.vectors import LANES
from heddle.layout.cache_rows import RowFormat

TILE_BYTES = 200 << 10
"""Of a tile of keys and values: a share of a core's own cache."""
MAX_TILE = 192


def paged_attention(
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
    """See the reference, which also serves what is wider than float32 or no multiple of 8 wide.

    Args:
        num_threads: of this rank; no effect on the result.
    """
    name = row_format.dtype if row_format is not None else _name(rows)
    if not _fits(query, name, (widths.key, widths.value), scale):
        return reference.paged_attention(
            query, rows, plan, widths, kv_head_of_lane, scale, softcap, row_format
        )
    width = rows.element_size()
    keys = _Rows(rows.data_ptr(), rows.stride(0) * width, rows.stride(1) * width, 0)
    values = keys._replace(start=widths.value_start)
    settings = _Settings(name, _parts(row_format), scale, softcap, num_threads)
    return _attend(query, keys, values, widths, plan, kv_head_of_lane, settings)


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: PagedPlan,
    kv_head_of_lane: npt.NDArray[np.int32],
    scale: float,
    softcap: float = 0.0,
    num_threads: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference, which also serves what is wider than float32 or no multiple of 8 wide.

    Args:
        num_threads: of this rank; no effect on the result.
    """
    key, value = _packed(key), _packed(value)
    name, widths = _name(key), RowWidths(key.shape[-1], 0, value.shape[-1])
    fits = _fits(query, name, (widths.key, widths.value), scale)
    if not fits or value.dtype != key.dtype:
        return reference.dense_attention(query, key, value, plan, kv_head_of_lane, scale, softcap)
    keys, values = _rows_of(key), _rows_of(value)
    apart, left = divmod(values.address - keys.address, key.element_size())
    if keys[1:] == values[1:] and left == 0 and 0 <= apart <= widths.key - widths.value:
        values = keys._replace(start=apart)  # of a latent: read once
    settings = _Settings(name, _parts(None), scale, softcap, num_threads)
    return _attend(query, keys, values, widths, plan, kv_head_of_lane, settings)


def _parts(row_format: RowFormat | None) -> array[int]:
    """How many parts, then the element at which each ends; see `widen`."""
    ends = list(accumulate(row_format.parts)) if row_format is not None else []
    return array("q", [len(ends), *ends, *[0] * (MAX_PARTS - 1 - len(ends))])


class _Rows(NamedTuple):
    """Where keys or values lie."""

    address: int
    row_bytes: int
    head_bytes: int
    start: int
    """Element of a row at which they begin."""


class _Settings(NamedTuple):
    name: str
    parts: array[int]
    scale: float
    softcap: float
    num_threads: int


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """With the elements of a row side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _rows_of(tensor: torch.Tensor) -> _Rows:
    width = tensor.element_size()
    return _Rows(tensor.data_ptr(), tensor.stride(0) * width, tensor.stride(1) * width, 0)


def _fits(query: torch.Tensor, name: str, widths: tuple[int, int], scale: float) -> bool:
    narrow = all(width > 0 and width % LANES == 0 for width in widths)
    return query.dtype != torch.float64 and name in ELEMENTS and narrow and scale > 0


def _attend(
    query: torch.Tensor,
    keys: _Rows,
    values: _Rows,
    widths: RowWidths,
    plan: PagedPlan,
    kv_head_of_lane: npt.NDArray[np.int32],
    settings: _Settings,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference."""
    query, work = _packed(query.float()), work_of(plan, kv_head_of_lane)
    num_rows, num_lanes, _ = query.shape
    is_within = keys[:3] == values[:3] and values.start + widths.value <= widths.key
    tile, panels = _tile(widths, is_within), -(-work.max_lanes // WIDTH)
    room = kernel.room_floats(widths.key, widths.value, tile, panels, is_within)
    scratch = torch.empty(settings.num_threads * room)
    partial = torch.empty(work.num_partial * (widths.value + 1))
    out = torch.empty((num_rows, num_lanes, widths.value))
    lse = torch.empty((num_rows, num_lanes))
    if len(work.lanes) < num_lanes:
        out.zero_()
        lse.fill_(-torch.inf)
    counter = array("q", (0,))
    given = {
        words.COUNTER: counter.buffer_info()[0],
        words.UNITS: work.units.buffer_info()[0],
        words.NUM_UNITS: len(work.units) // UNIT_WORDS,
        words.MERGES: work.merges.buffer_info()[0],
        words.NUM_MERGES: len(work.merges) // MERGE_WORDS,
        words.GROUPED_LANES: work.lanes.buffer_info()[0],
        words.UNTIL: work.until.buffer_info()[0],
        words.HEADS: work.heads.buffer_info()[0],
        words.QUERY: query.data_ptr(),
        words.QUERY_ROW: query.stride(0),
        words.QUERY_LANE: query.stride(1),
        words.NUM_LANES: num_lanes,
        words.KEY: keys.address,
        words.KEY_ROW: keys.row_bytes,
        words.KEY_HEAD: keys.head_bytes,
        words.KEY_WIDTH: widths.key,
        words.VALUE: values.address,
        words.VALUE_ROW: values.row_bytes,
        words.VALUE_HEAD: values.head_bytes,
        words.VALUE_START: values.start,
        words.VALUE_IN_KEY: values.start if is_within else -1,
        words.VALUE_WIDTH: widths.value,
        words.ELEMENT: ELEMENTS[settings.name],
        words.PARTS: settings.parts.buffer_info()[0],
        words.TABLES: plan.block_tables.ctypes.data,
        words.TABLE_BLOCKS: plan.block_tables.shape[1],
        words.TABLE_OF_ROW: plan.table_of_row.ctypes.data,
        words.FIRST: plan.first.ctypes.data,
        words.END: plan.end.ctypes.data,
        words.BLOCK_SIZE: plan.block_size,
        words.SCALE: real_word(settings.scale),
        words.SOFTCAP: real_word(settings.softcap),
        words.OUT: out.data_ptr(),
        words.LSE: lse.data_ptr(),
        words.PARTIAL_OUT: partial.data_ptr(),
        words.PARTIAL_LSE: partial.data_ptr() + 4 * work.num_partial * widths.value,
        words.TILE: tile,
        words.PANELS: panels,
        words.ROOM: scratch.data_ptr(),
        words.ROOM_FLOATS: room,
    }
    launch(kernel.attention, words.in_order(given), settings.num_threads, is_repeatable=False)
    return out, lse


def _tile(widths: RowWidths, is_within: bool) -> int:
    """Keys of a tile, in whole register tiles."""
    row = widths.key + GAP + (0 if is_within else widths.value + GAP)
    height = kernel.HEIGHT
    return max(height, min(MAX_TILE, TILE_BYTES // 4 // row) // height * height)
