"""`ag_ar`: all-gather the lse, weigh, all-reduce the weighted partials, keep one's own.

The way back for COPY rows, where every PCP rank wants the same rows. Bytes received, with `rows`
gathered rows of `k * h` heads, `Dv` values of `e` bytes:
`(N - 1) * rows * k * h * e + 2 * (N - 1) / N * rows * k * h * Dv * e` in 2 calls.
"""

from __future__ import annotations

import torch

from heddle.attention.exchange.placement import Placement
from heddle.attention.exchange.weighted import weigh_own
from heddle.attention.state import AttentionState
from heddle.comm.base import Communicator
from heddle.kernels.registry import Kernels


class AllGatherAllReduce:
    """Each rank receives the sum for all rows and heads."""

    name = "ag_ar"

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
        out = dcp.all_reduce(term.out)
        return AttentionState(placement.own(out), placement.own(term.lse))
