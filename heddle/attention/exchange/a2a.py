"""`a2a`: partials and their lse travel together in one all-to-all; the destination merges.

The lse is one more column of the buffer, so it keeps all its bits. Bytes received per row and head
that a rank owns, with `Dv` values of `e` bytes: `(N - 1) * (Dv + 1) * e` in 1 call.
"""

from __future__ import annotations

import torch

from heddle.attention.exchange.placement import Placement
from heddle.attention.state import AttentionState, merge
from heddle.comm.base import Communicator
from heddle.kernels.registry import Kernels, create_kernels
from heddle.kernels.state_pack.reference import Grid


class AllToAll:
    """Each rank receives every partial of its own rows and heads."""

    name = "a2a"

    def __init__(self, *, strict: bool = False, kernels: Kernels | None = None) -> None:
        """Note who packs and merges.

        Args:
            strict: raise on NaN or inf where keys were seen.
            kernels: of this rank; None: torch.
        """
        self._strict = strict
        self._kernels = kernels or create_kernels("torch")

    def merge(
        self,
        state: AttentionState,
        visible: torch.Tensor,
        placement: Placement,
        dcp: Communicator,
    ) -> AttentionState:
        """See `Exchange.merge`."""
        grid = Grid(placement.num_replicas, placement.slice_size, placement.is_copy)
        blocks = self._kernels.state_pack(state.out, state.lse, grid)
        return merge_blocks(
            blocks, visible, placement, dcp, strict=self._strict, kernels=self._kernels
        )


def packed(state: AttentionState) -> torch.Tensor:
    """Output and lse side by side, `[..., Dv + 1]`."""
    return torch.cat([state.out, state.lse.unsqueeze(-1)], dim=-1)


def unpacked(tensor: torch.Tensor) -> AttentionState:
    """The inverse of `packed`, as views."""
    return AttentionState(tensor[..., :-1], tensor[..., -1])


def merge_blocks(
    blocks: torch.Tensor,
    visible: torch.Tensor,
    placement: Placement,
    dcp: Communicator,
    *,
    strict: bool = False,
    kernels: Kernels | None = None,
) -> AttentionState:
    """Send each rank the partials of its own rows and heads, and merge what arrives.

    Args:
        blocks: `[N, n, h, Dv + 1]`, packed partials by destination.
        visible: see `Exchange.merge`.
        placement: of these rows.
        dcp: the group.
        strict: see `merge`.
        kernels: who merges; None: torch.
    """
    received = dcp.all_to_all(blocks)
    seen = placement.own(placement.seen(visible), dim=1)  # [N, n, h]: what has arrived
    return merge(unpacked(received), seen, strict=strict, kernels=kernels)
