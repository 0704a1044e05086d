"""`a2a_fine`: all-to-all to fine blocks of heads, merge there, all-gather over the PCP ranks.

The way back for COPY rows: every PCP rank wants the same rows, so each of them merges a part of the
heads for all. The h lanes of a rank are cut in P' blocks; the block of position r of the group is
the r-th of all, since positions walk the PCP ranks first:

    P' = 2, k = 2, h = 4     lanes   0 1 | 2 3 | 4 5 | 6 7
                             merged   r=0   r=1   r=2   r=3       r = 0, 1 own lanes 0 to 3

Bytes received, with `n` rows, `Dv` values of `e` bytes:
`(N - 1) / N * n * k * h * (Dv + 1) * e + (P' - 1) * n * h / P' * Dv * e` in 2 calls.
"""

from __future__ import annotations

import math

import torch

from heddle.attention.exchange.a2a import packed, unpacked
from heddle.attention.exchange.placement import Placement
from heddle.attention.state import AttentionState, merge
from heddle.comm.base import Communicator
from heddle.kernels.registry import Kernels, create_kernels
from heddle.kernels.state_pack.reference import Grid


class FineAllToAll:
    """Each rank merges some heads of COPY rows for all PCP ranks."""

    name = "a2a_fine"

    def __init__(
        self,
        replicas: Communicator,
        *,
        keeps_lse: bool = False,
        strict: bool = False,
        kernels: Kernels | None = None,
    ) -> None:
        """Note how results are shared.

        Args:
            replicas: the PCP ranks of the DCP group, in the order of their row blocks.
            keeps_lse: share the lse too; needed where something is merged later, such as sinks.
                Else it comes out as NaN.
            strict: raise on NaN or inf where keys were seen.
            kernels: who packs and merges; None: torch.
        """
        self._replicas = replicas
        self._keeps_lse = keeps_lse
        self._strict = strict
        self._kernels = kernels or create_kernels("torch")

    def merge(
        self,
        state: AttentionState,
        visible: torch.Tensor,
        placement: Placement,
        dcp: Communicator,
    ) -> AttentionState:
        """See `Exchange.merge`; only COPY rows, and P' divides h.

        Raises:
            ValueError: other rows, or a rank's lanes cannot be cut.
        """
        if not placement.is_copy or placement.lanes % placement.num_replicas:
            raise ValueError(
                f"a2a_fine cuts {placement.lanes} head lanes of copied rows in "
                f"{placement.num_replicas}; is_copy={placement.is_copy}"
            )
        heads_only = Grid(1, placement.world_size, is_copy=True)
        blocks = self._kernels.state_pack(state.out, state.lse, heads_only)
        arrived = unpacked(dcp.all_to_all(blocks))  # [N, n, h / P']
        seen = _fine(placement.seen(visible).movedim(0, -1), placement.world_size)[dcp.rank]
        merged = merge(arrived, seen.movedim(-1, 0), strict=self._strict, kernels=self._kernels)
        return self._shared(merged)

    def _shared(self, merged: AttentionState) -> AttentionState:
        """All lanes of this rank, from those who merged them."""
        own = packed(merged) if self._keeps_lse else merged.out.contiguous()
        gathered = self._replicas.all_gather(own)  # [P', n, h / P', ...]
        lanes = gathered.movedim(0, 1).flatten(1, 2)  # [n, h, ...]
        if self._keeps_lse:
            return unpacked(lanes)
        return AttentionState(lanes, torch.full_like(lanes[..., 0], math.nan))


def _fine(tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """`[n, k * h, ...]` -> `[N, n, h / P', ...]`."""
    rows, lanes, *rest = tensor.shape
    blocks = tensor.reshape(rows, num_blocks, lanes // num_blocks, *rest)
    return blocks.movedim(1, 0).contiguous()
