"""`a2a`: partials and their lse travel together in one all-to-all; the destination merges.

The lse is one more column of the buffer, so it keeps all its bits. Bytes received per row and head
that a rank owns, with `Dv` values of `e` bytes: `(N - 1) * (Dv + 1) * e` in 1 call.
"""

from __future__ import annotations

import torch

from heddle.attention.exchange.placement import Placement
from heddle.attention.state import AttentionState, merge
from heddle.comm.base import Communicator


class AllToAll:
    """Each rank receives every partial of its own rows and heads."""

    name = "a2a"

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict

    def merge(
        self,
        state: AttentionState,
        visible: torch.Tensor,
        placement: Placement,
        dcp: Communicator,
    ) -> AttentionState:
        """See `Exchange.merge`."""
        packed = torch.cat([state.out, state.lse.unsqueeze(-1)], dim=-1)
        received = dcp.all_to_all(placement.destinations(packed))  # [N, n, h, Dv + 1]
        partials = AttentionState(received[..., :-1], received[..., -1])
        seen = placement.own(placement.seen(visible), dim=1)  # [N, n, h]: what has arrived
        return merge(partials, seen, strict=self._strict)
