"""Paged attention on a GPU: a program takes one row, some lanes of one kv head, one split of keys.

    grid   rows x groups of lanes   x   splits of a row's keys

Lanes of a kv head share each key that is loaded, so a stored byte crosses the bus once for up to
`block_lanes` query heads. Splits give a long sequence to the whole device; each leaves a state of
its own, and the merge of states (`heddle.kernels.state_merge`) is the second pass.

A key is met in two tiles, `| main | rest |`, since tiles have sides of powers of two: 576 = 512 +
64. The value of a latent row is its main tile, loaded once for both products.

Codes of 8 bits are exact in bfloat16. Their scales, one for each part of a row, multiply scores and
weights instead of keys and values:

    q . (s k) = s (q . k)        w (s v) = (w s) v

Legend: `R` rows, `Hq` lanes, `Ks` kv heads, `W` elements of a stored row, `Dv` value width, `S`
sequences, `B` blocks of the longest, `X` splits.
Source: "Flash-Decoding for long-context inference" (2023); online softmax, Milakov and Gimelshein
(2018).
"""

from __future__ import annotations

import triton
import triton.language as tl

from heddle.kernels.triton_math import dot_in_parts, tanh

_WITHOUT_BIT_14: tl.constexpr = tl.constexpr(-16385)
_E4M3_AS_HALF: tl.constexpr = tl.constexpr(256.0)
"""See `heddle.kernels.row_encode.reference`: e4m3 read as float16 is so much smaller."""


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(codes, form: tl.constexpr, dot_type: tl.constexpr):
    """Stored elements in the type of products; codes without their scale."""
    if form == "int8":
        return codes.to(tl.float32).to(dot_type)
    if form == "fp8_e4m3":
        bits = (codes.to(tl.int16) << 7) & _WITHOUT_BIT_14
        return (bits.to(tl.float16, bitcast=True).to(tl.float32) * _E4M3_AS_HALF).to(dot_type)
    return codes.to(dot_type)


@triton.jit  # type: ignore[untyped-decorator]
def _tile(
    at,
    is_key,
    start: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    form: tl.constexpr,
    dot_type: tl.constexpr,
):
    """Elements [start, start + width) of stored rows, `[keys, block]`; 0 beyond, and unseen."""
    columns = tl.arange(0, block)
    seen = is_key[:, None] & (columns < width)[None, :]
    codes = tl.load(at[:, None] + start + columns[None, :], mask=seen, other=0)
    return _numbers(codes, form, dot_type)


@triton.jit  # type: ignore[untyped-decorator]
def _query_tile(
    query, lanes, lane_stride, start: tl.constexpr, width: tl.constexpr, block: tl.constexpr
):
    """Elements [start, start + width) of the queries of some lanes, float32."""
    columns = tl.arange(0, block)
    seen = (lanes >= 0)[:, None] & (columns < width)[None, :]
    at = query + lanes[:, None] * lane_stride + start + columns[None, :]
    return tl.load(at, mask=seen, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def decode_kernel(
    query,  # [R, Hq, Dq]
    rows,  # [slots, Ks, W]
    scales,  # the same memory as float32, read where rows are codes
    block_tables,  # [S, B]
    table_of_row,  # [R]
    first_of_row,  # [R]
    end_of_row,  # [R]
    group_heads,  # [groups], -1: lanes that read nothing
    group_lanes,  # [groups, block_lanes], -1: no lane
    outs,  # [X, R, Hq, Dv]
    lses,  # [X, R, Hq]
    num_groups,
    num_rows,
    num_lanes,
    query_row_stride,
    query_lane_stride,
    slot_stride,
    head_stride,
    table_stride,
    scale,
    softcap,
    block_size: tl.constexpr,
    main: tl.constexpr,
    rest: tl.constexpr,
    value_start: tl.constexpr,
    value: tl.constexpr,
    main_block: tl.constexpr,
    rest_block: tl.constexpr,
    value_block: tl.constexpr,
    block_lanes: tl.constexpr,
    block_keys: tl.constexpr,
    has_softcap: tl.constexpr,
    value_is_main: tl.constexpr,
    form: tl.constexpr,
    first_scale: tl.constexpr,
    rest_scale: tl.constexpr,
    value_scale: tl.constexpr,
    dot_type: tl.constexpr,
    query_parts: tl.constexpr,
    weight_parts: tl.constexpr,
    upcast: tl.constexpr,
):
    """The state of some lanes of one row over one split of its keys; nil where there are none."""
    is_coded: tl.constexpr = form != "plain"
    row = (tl.program_id(0) // num_groups).to(tl.int64)
    group = tl.program_id(0) % num_groups
    split = tl.program_id(1)
    lanes = tl.load(group_lanes + group * block_lanes + tl.arange(0, block_lanes))
    head = tl.load(group_heads + group)

    first = tl.load(first_of_row + row)
    end = tl.load(end_of_row + row)
    end = tl.where(head >= 0, end, first)
    per_split = tl.cdiv(tl.cdiv(end - first, tl.num_programs(1)), block_keys) * block_keys
    begin = first + split * per_split
    stop = tl.minimum(begin + per_split, end)
    table = block_tables + tl.load(table_of_row + row).to(tl.int64) * table_stride

    query_at = query + row * query_row_stride
    main_query = _query_tile(query_at, lanes, query_lane_stride, 0, main, main_block)
    if rest > 0:
        rest_query = _query_tile(query_at, lanes, query_lane_stride, main, rest, rest_block)

    anchor = tl.full([block_lanes], -3.0e38, tl.float32)
    total = tl.zeros([block_lanes], tl.float32)
    sums = tl.zeros([block_lanes, value_block], tl.float32)
    no_scores = tl.zeros([block_lanes, block_keys], tl.float32)
    for start in range(begin, stop, block_keys):
        local = start + tl.arange(0, block_keys)
        is_key = local < stop
        block = tl.load(table + local // block_size, mask=is_key, other=0)
        slot = block.to(tl.int64) * block_size + local % block_size
        at = rows + slot * slot_stride + head * head_stride
        scale_at = scales + (slot * slot_stride + head * head_stride) // 4

        keys = _tile(at, is_key, 0, main, main_block, form, dot_type)
        scores = dot_in_parts(main_query, tl.trans(keys), no_scores, query_parts, upcast)
        if is_coded:
            scores *= tl.load(scale_at + first_scale, mask=is_key, other=0.0)[None, :]
        if rest > 0:
            rest_keys = _tile(at, is_key, main, rest, rest_block, form, dot_type)
            more = dot_in_parts(rest_query, tl.trans(rest_keys), no_scores, query_parts, upcast)
            if is_coded:
                more *= tl.load(scale_at + rest_scale, mask=is_key, other=0.0)[None, :]
            scores += more
        scores *= scale
        if has_softcap:
            scores = tanh(scores / softcap) * softcap
        scores = tl.where(is_key[None, :], scores, float("-inf"))

        # NaN takes no part in the maximum, whose rule for it differs; it stays in the weights.
        comparable = tl.where(scores == scores, scores, float("-inf"))
        higher = tl.maximum(anchor, tl.max(comparable, axis=1))
        kept = tl.exp(anchor - higher)
        weights = tl.exp(scores - higher[:, None])
        total = total * kept + tl.sum(weights, axis=1)
        anchor = higher

        if value_is_main:
            values = keys
        else:
            values = _tile(at, is_key, value_start, value, value_block, form, dot_type)
        if is_coded:
            weights *= tl.load(scale_at + value_scale, mask=is_key, other=0.0)[None, :]
        sums = dot_in_parts(weights, values, sums * kept[:, None], weight_parts, upcast)

    has_keys = total != 0.0  # true of NaN
    total = tl.where(has_keys, total, 1.0)
    lse = tl.where(has_keys, anchor + tl.log(total), float("-inf"))
    places = (split * num_rows + row) * num_lanes + lanes
    tl.store(lses + places, lse, mask=lanes >= 0)
    columns = tl.arange(0, value_block)
    cells = (lanes >= 0)[:, None] & (columns < value)[None, :]
    tl.store(outs + places[:, None] * value + columns[None, :], sums / total[:, None], mask=cells)
