"""The part that exchanges by sum share: every rank learns all lse and weighs its own partial."""

from __future__ import annotations

import torch

from heddle.attention.state import AttentionState, weigh, weights
from heddle.comm.base import Communicator
from heddle.kernels.registry import Kernels


def weigh_own(
    state: AttentionState,
    seen: torch.Tensor,
    dcp: Communicator,
    *,
    strict: bool,
    kernels: Kernels | None = None,
) -> AttentionState:
    """This rank's term of the merged output, with the merged lse.

    One all-gather of `[rows, k * h]`.

    Args:
        state: this rank's partial.
        seen: bool `[N, rows, k * h]`: which partials saw a key.
        dcp: the group.
        strict: see `weights`.
        kernels: who computes, where nothing is raised; None: torch.

    Returns:
        out: `a_r * out_r`, which sums over the group to the merged output; lse: merged.
    """
    if kernels is not None and not strict:
        lses = dcp.all_gather(state.lse)
        return AttentionState(*kernels.state_weigh(state.out, lses, seen, dcp.rank))
    shares, lse = weights(dcp.all_gather(state.lse), seen, strict=strict)
    return AttentionState(weigh(state.out, shares[dcp.rank], seen[dcp.rank]), lse)
