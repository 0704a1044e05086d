"""`ag_rs`: all-gather the lse, weigh, reduce-scatter the weighted partials.

Bytes received per row and head that a rank owns, with `Dv` values of `e` bytes:
`(N - 1) * (N * e + Dv * e)` in 2 calls.
"""

from __future__ import annotations

import torch

from heddle.attention.exchange.placement import Placement
from heddle.attention.exchange.weighted import weigh_own
from heddle.attention.state import AttentionState
from heddle.comm.base import Communicator
from heddle.kernels.registry import Kernels


class AllGatherReduceScatter:
    """Each rank receives the sum for its own rows and heads."""

    name = "ag_rs"

    def __init__(self, *, strict: bool = False, kernels: Kernels | None = None) -> None:
        """Note who weighs.

        Args:
            strict: raise on NaN or inf where keys were seen.
            kernels: of this rank; None: torch.
        """
        self._strict = strict
        self._kernels = kernels

    def merge(
        self,
        state: AttentionState,
        visible: torch.Tensor,
        placement: Placement,
        dcp: Communicator,
    ) -> AttentionState:
        """See `Exchange.merge`."""
        term = weigh_own(
            state, placement.seen(visible), dcp, strict=self._strict, kernels=self._kernels
        )
        out = dcp.reduce_scatter(placement.destinations(term.out))
        return AttentionState(out, placement.own(term.lse))
