"""Paged attention in Triton: the choice of tiles, the launch, the merge of splits.

`attend` is the form for an engine, which plans once per step and calls it in every layer;
`paged_decode` has the signature of the reference and plans each time.

Without atomics and with splits that follow from sizes alone, results are equal bit for bit from run
to run.

Legend: `R` rows, `Hq` lanes, `Ks` kv heads, `W` elements of a stored row, `Dq`, `Dv` widths.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl

from heddle.errors import UnsupportedError
from heddle.kernels.paged_decode.plan import PagedPlan, RowWidths
from heddle.kernels.paged_decode.triton_kernel import decode_kernel
from heddle.kernels.paged_decode.triton_plan import DevicePlan, LaneGroups, choose_splits
from heddle.kernels.state_merge.triton_gpu import merge
from heddle.kernels.triton_math import MIN_DOT_SIDE, OPTIONS, is_interpreted, num_parts, padded
from heddle.layout.cache_rows import RowFormat

_DOT_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
_WIDE = 256
"""Values wider than this fill the registers: fewer lanes, more warps."""


class KeyTiles(NamedTuple):
    """A key as two tiles, and the scale of each where rows are codes."""

    main: int
    rest: int
    main_scale: int = 0
    rest_scale: int = 0
    value_scale: int = 0
    """Scales are counted in float32 numbers from the start of a stored row."""


class LayerForm(NamedTuple):
    """What the attention of a layer is, besides its tensors; constant while an engine runs."""

    widths: RowWidths
    """In elements."""
    scale: float
    softcap: float = 0.0
    row_format: RowFormat | None = None
    """Of stored rows; None: elements as they are."""

    @property
    def is_coded(self) -> bool:
        """Rows are bytes and scales."""
        return self.row_format is not None and self.row_format.is_quantized


def unsupported_reasons(
    query: torch.dtype, rows: torch.dtype, widths: RowWidths, row_format: RowFormat | None = None
) -> list[str]:
    """Everything that stands in the way of such tensors; empty when nothing does."""
    reasons = []
    if query not in _DOT_TYPES:
        reasons.append(f"queries of {query}; must be float32, bfloat16 or float16")
    if row_format is None or not row_format.is_quantized:
        if rows not in _DOT_TYPES:
            reasons.append(f"rows of {rows}; must be float32, bfloat16, float16 or codes")
    elif _coded_tiles(widths, row_format) is None:
        reasons.append(
            f"codes in parts {row_format.parts} for keys of {widths.key}; a key must be one or two "
            "whole parts, a value must lie in one, and all parts must add up to a multiple of 4"
        )
    return reasons


def paged_decode(
    query: torch.Tensor,
    rows: torch.Tensor,
    plan: PagedPlan,
    widths: RowWidths,
    kv_head_of_lane: npt.NDArray[np.int32],
    scale: float,
    softcap: float = 0.0,
    row_format: RowFormat | None = None,
    *,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.paged_decode`; results are float32.

    Args:
        query: see there.
        rows: see there; contiguous where they are codes.
        plan: see there.
        widths: see there.
        kv_head_of_lane: see there.
        scale: see there.
        softcap: see there.
        row_format: see there.
        num_splits: of each row's keys; None: as the device needs.

    Raises:
        UnsupportedError: see `unsupported_reasons`.
    """
    groups = LaneGroups.of(kv_head_of_lane, max_lanes(widths), query.device)
    layer = LayerForm(widths, scale, softcap, row_format)
    return attend(query, rows, DevicePlan.of(plan, query.device), groups, layer, num_splits)


def max_lanes(widths: RowWidths) -> int:
    """Lanes of a group at most."""
    return 64 if widths.value <= _WIDE else 32


def attend(
    query: torch.Tensor,
    rows: torch.Tensor,
    plan: DevicePlan,
    groups: LaneGroups,
    layer: LayerForm,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer, see `paged_decode`; nothing is copied to the device or waited for."""
    reasons = unsupported_reasons(query.dtype, rows.dtype, layer.widths, layer.row_format)
    if reasons:
        raise UnsupportedError(f"Triton cannot attend: {'; '.join(reasons)}")
    num_rows, num_lanes, _ = query.shape
    programs = num_rows * len(groups.heads)
    splits = num_splits or choose_splits(programs, plan.longest, query.device)
    shape = (splits, num_rows, num_lanes)
    outs = query.new_empty((*shape, layer.widths.value), dtype=torch.float32)
    lses = query.new_empty(shape, dtype=torch.float32)
    if programs:
        _launch(query, rows, plan, groups, layer, outs, lses)
    return (outs[0], lses[0]) if splits == 1 else merge(outs, lses)


def _launch(
    query: torch.Tensor,
    rows: torch.Tensor,
    plan: DevicePlan,
    groups: LaneGroups,
    layer: LayerForm,
    outs: torch.Tensor,
    lses: torch.Tensor,
) -> None:
    query = query if query.stride(-1) == 1 else query.contiguous()
    constants = kernel_constants(query.dtype, rows.dtype, layer, groups.lanes.shape[1])
    decode_kernel[(query.shape[0] * len(groups.heads), outs.shape[0])](
        query,
        rows.view(torch.int8) if layer.is_coded else rows,
        rows.view(torch.float32) if layer.is_coded else lses,
        plan.block_tables,
        plan.table_of_row,
        plan.first,
        plan.end,
        groups.heads,
        groups.lanes,
        outs,
        lses,
        len(groups.heads),
        query.shape[0],
        query.shape[1],
        *query.stride()[:2],
        *rows.stride()[:2],
        plan.block_tables.stride(0),
        layer.scale,
        layer.softcap,
        block_size=plan.block_size,
        upcast=is_interpreted(),
        **constants,
    )


def kernel_constants(
    query: torch.dtype, rows: torch.dtype, layer: LayerForm, block_lanes: int
) -> dict[str, Any]:
    """Compile-time settings of the kernel for tensors of these types."""
    widths, row_format = layer.widths, layer.row_format
    tiles = _tiles(widths, row_format)
    dot = torch.bfloat16 if layer.is_coded else rows
    if dot == torch.float16 != query:  # its range is too small for queries of another type
        dot = torch.float32
    is_narrow = widths.key <= _WIDE
    many_keys = dot != torch.float32 and not layer.is_coded  # registers hold codes twice
    return {
        "main": tiles.main,
        "rest": tiles.rest,
        "value_start": widths.value_start,
        "value": widths.value,
        "main_block": padded(tiles.main, MIN_DOT_SIDE),
        "rest_block": padded(max(1, tiles.rest), MIN_DOT_SIDE),
        "value_block": padded(widths.value, MIN_DOT_SIDE),
        "block_lanes": block_lanes,
        "block_keys": (32 if is_narrow else 16) * (2 if many_keys else 1),
        "value_is_main": widths.value_start == 0 and widths.value == tiles.main,
        "form": row_format.dtype if row_format and layer.is_coded else "plain",
        "has_softcap": layer.softcap > 0,
        "first_scale": tiles.main_scale,
        "rest_scale": tiles.rest_scale,
        "value_scale": tiles.value_scale,
        "dot_type": _DOT_TYPES[dot],
        "query_parts": num_parts(query, dot),
        "weight_parts": num_parts(torch.float32, dot),
        "num_warps": 4 if is_narrow and block_lanes <= 32 else 8,
        "num_stages": 2,
        **OPTIONS,
    }


def _tiles(widths: RowWidths, form: RowFormat | None) -> KeyTiles:
    if form is not None and form.is_quantized:
        tiles = _coded_tiles(widths, form)
        assert tiles is not None, "refused before"
        return tiles
    main = widths.key if widths.key < MIN_DOT_SIDE else 1 << (widths.key.bit_length() - 1)
    return KeyTiles(main, widths.key - main)


def _coded_tiles(widths: RowWidths, form: RowFormat) -> KeyTiles | None:
    """Each tile with one scale; None: parts do not allow it."""
    starts = [sum(form.parts[:part]) for part in range(len(form.parts) + 1)]
    key_parts = starts.index(widths.key) if widths.key in starts else 0
    value_parts = [
        part
        for part in range(len(form.parts))
        if starts[part] <= widths.value_start
        and widths.value_start + widths.value <= starts[part + 1]
    ]
    if key_parts not in (1, 2) or not value_parts or starts[-1] % 4:
        return None
    scales = starts[-1] // 4  # the first of them, in float32 numbers
    if key_parts == 2:
        first, second = form.parts[:2]
        return KeyTiles(first, second, scales, scales + 1, scales + value_parts[0])
    main = widths.key if widths.key < MIN_DOT_SIDE else 1 << (widths.key.bit_length() - 1)
    return KeyTiles(main, widths.key - main, scales, scales, scales + value_parts[0])
