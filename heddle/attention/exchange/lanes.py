"""Partials kept apart by canonical lane: one all-to-all, and a merge in the order of lanes.

The parts of a merge are then the same for every number of ranks, and so are its bits, as long as
each part depends on its own keys alone. Bytes received per row and head that a rank owns, with `Dv`
values of `e` bytes: `(N - 1) * X * (Dv + 1) * e` in 1 call.

Legend: `N` ranks of the group, `X` lanes of a rank, `Y = N * X`; rank r holds lanes r, r + N, ...
Source: `heddle.step.lanes`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from heddle.attention.exchange.a2a import packed, unpacked
from heddle.attention.exchange.placement import Placement
from heddle.attention.state import AttentionState, merge
from heddle.comm.base import Communicator


def merge_lanes(
    states: Sequence[AttentionState],
    visible: torch.Tensor,
    placement: Placement,
    dcp: Communicator,
) -> AttentionState:
    """Merge over the lanes of the whole group; in a group of one nothing is sent.

    Args:
        states: this rank's `X` partials, ascending by lane, lse `[rows, k * h]`.
        visible: bool `[Y, rows]`: whether a lane holds a key that a gathered row sees.
        placement: of these rows.
        dcp: the group.

    Returns:
        lse `[n, h]`: this rank's rows and heads over all keys.
    """
    blocks = [placement.destinations(packed(state)) for state in states]
    received = dcp.all_to_all(torch.stack(blocks, dim=1))  # [N, X, n, h, Dv + 1]
    partials = unpacked(received.transpose(0, 1).flatten(0, 1))  # [Y, n, h], lane by lane
    seen = placement.own(placement.seen(visible), dim=1)
    return merge(partials, seen, strict=False)
