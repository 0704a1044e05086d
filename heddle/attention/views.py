"""Rows against keys of which each row meets one range."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from heddle.attention.backends.base import AttentionBackend, KeyRange, Visible
from heddle.attention.kinds.base import AttentionKind
from heddle.attention.state import AttentionState, merge
from heddle.layout.heads import HeadRun
from heddle.step.views import Ranges


def visible_of(ranges: Ranges) -> Visible:
    """Ranges as a backend takes them."""
    return KeyRange(ranges.first, ranges.end)


def attend(
    backend: AttentionBackend,
    kind: AttentionKind,
    query: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor],
    runs: Sequence[HeadRun],
    visible: Visible,
) -> AttentionState:
    """One call of a backend with the constants of a layer.

    Args:
        backend: computes.
        kind: scale and soft cap.
        query: `[R, h, Dq]`.
        keys: key `[L, Ks, Dq]` and value `[L, Ks, Dv]`.
        runs: lanes -> kv heads.
        visible: keys that each row meets.
    """
    key, value = keys
    return backend.attend(query, key, value, runs, visible, kind.scale, kind.softcap)


def joined(states: Sequence[AttentionState]) -> AttentionState:
    """States of the same rows over disjoint keys, as one."""
    return states[0] if len(states) == 1 else merge(states, strict=False)
