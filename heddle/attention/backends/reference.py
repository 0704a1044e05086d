"""Dense attention, written to be read: all scores at once, masked by comparison.

Legend: `R` query rows, `Hq` lanes, `L` keys, `Ks` kv heads, `Dq`, `Dv` widths, `G` lanes of a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from heddle.attention.backends.base import Visible, checked_visible
from heddle.attention.state import AttentionState, accumulation_dtype
from heddle.layout.heads import HeadRun


class ReferenceBackend:
    """Any dtype and width; memory is `Hq * R * L` scores."""

    name = "reference"

    def unsupported_reasons(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device,  # noqa: ARG002 - runs where torch runs
        key_width: int,  # noqa: ARG002
        value_width: int,  # noqa: ARG002
    ) -> list[str]:
        """Only floats have a softmax."""
        return [] if dtype.is_floating_point else [f"dtype {dtype}; attention needs floats"]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        runs: Sequence[HeadRun],
        visible: Visible,
        scale: float,
    ) -> AttentionState:
        """See `AttentionBackend.attend`."""
        rows, lanes, _ = query.shape
        lengths = checked_visible(visible, rows, key.shape[0])
        num_keys = int(lengths.max(initial=0))
        dtype = accumulation_dtype(query.dtype, key.dtype, value.dtype)
        state = AttentionState.nil((rows, lanes, value.shape[-1]), dtype=dtype, device=query.device)
        bounds = torch.tensor(lengths, device=query.device)
        sees = torch.arange(num_keys, device=query.device) < bounds[:, None]  # [R, L]
        some = sees.any(dim=-1)  # [R]
        for kv_index, start, end in runs:
            head_key = key[:num_keys, kv_index].to(dtype)  # [L, Dq]
            head_value = value[:num_keys, kv_index].to(dtype)  # [L, Dv]
            scores = query[:, start:end].to(dtype) @ head_key.T * scale  # [R, G, L]
            scores = torch.where(sees[:, None], scores, -math.inf)
            lse = torch.logsumexp(scores, dim=-1)  # [R, G]
            out = torch.softmax(scores, dim=-1) @ head_value  # [R, G, Dv]
            state.out[:, start:end] = torch.where(some[:, None, None], out, 0.0)
            state.lse[:, start:end] = torch.where(some[:, None], lse, -math.inf)
        return state
