"""What paged attention means, in plain torch: row by row, keys gathered by slot."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from heddle.kernels.paged_decode.plan import PagedPlan, RowWidths
from heddle.kernels.row_encode.reference import decode
from heddle.layout.cache_rows import RowFormat


def paged_decode(
    query: torch.Tensor,
    rows: torch.Tensor,
    plan: PagedPlan,
    widths: RowWidths,
    kv_head_of_lane: npt.NDArray[np.int32],
    scale: float,
    softcap: float = 0.0,
    row_format: RowFormat | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of each row over its own keys.

    Slots that no row meets are never read and may hold NaN.

    Args:
        query: `[R, Hq, Dq]`.
        rows: `[slots, Ks, W]`, the pool of one layer, float; or bytes, see `row_format`.
        plan: which keys each row meets.
        widths: of keys and values within a stored row.
        kv_head_of_lane: `[Hq]`: the kv head that each lane reads; -1: none, the lane comes out nil.
        scale: multiplies the scores; part of the lse.
        softcap: c > 0 turns a scaled score s into c * tanh(s / c); 0: none.
        row_format: of stored rows; needed where they are quantised.

    Returns:
        out `[R, Hq, Dv]` and the natural lse `[R, Hq]`, float32 or wider; exactly 0 and -inf where
        nothing is met.
    """
    quantised = row_format if row_format is not None and row_format.is_quantized else None
    stored_as = rows.dtype if quantised is None else torch.float32
    dtype = torch.promote_types(torch.promote_types(query.dtype, stored_as), torch.float32)
    num_rows, lanes, _ = query.shape
    out = query.new_zeros((num_rows, lanes, widths.value), dtype=dtype)
    lse = query.new_full((num_rows, lanes), -torch.inf, dtype=dtype)
    used = np.flatnonzero(kv_head_of_lane >= 0)
    heads = torch.from_numpy(kv_head_of_lane[used]).long()
    for row in range(num_rows):
        met = np.arange(plan.first[row], plan.end[row])
        if len(met) == 0 or len(used) == 0:
            continue
        blocks = plan.block_tables[plan.table_of_row[row], met // plan.block_size]
        slots = torch.from_numpy(blocks * plan.block_size + met % plan.block_size)
        stored = rows[slots][:, heads]
        found = stored if quantised is None else decode(stored, quantised)
        found = found.to(dtype).transpose(0, 1)  # [used, L, W]
        key, value = found[..., : widths.key], found[..., widths.value_start :]
        scores = (key @ query[row, used].to(dtype).unsqueeze(-1)).squeeze(-1) * scale
        if softcap > 0:
            scores = torch.tanh(scores / softcap) * softcap
        lse[row, used] = torch.logsumexp(scores, dim=-1)
        weights = torch.softmax(scores, dim=-1).unsqueeze(1)
        out[row, used] = (weights @ value[..., : widths.value]).squeeze(1)
    return out, lse
