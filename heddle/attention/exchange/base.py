"""How partial states of one DCP group become the state of all its keys.

Every rank has met the gathered queries with the keys it stores. An exchange merges these partials
and leaves each rank with its own rows and heads. All exchanges give the same values; they differ in
calls, bytes and in what travels. Emptiness comes from the plan, as a mask, never from payloads.

Legend: `N` ranks of the group, `rows` and `k * h` gathered rows and heads (see `placement`), `n`
and `h` this rank's own, `Dv` value width.
"""

from __future__ import annotations

from typing import Protocol

import torch

from heddle.attention.exchange.placement import Placement
from heddle.attention.state import AttentionState
from heddle.comm.base import Communicator, RankGroups


class Exchange(Protocol):
    """Merges the partial states of a DCP group."""

    @property
    def name(self) -> str:
        """Name in the registry."""
        ...

    def merge(
        self,
        state: AttentionState,
        visible: torch.Tensor,
        placement: Placement,
        dcp: Communicator,
    ) -> AttentionState:
        """Merge over the group.

        Args:
            state: this rank's partial, lse `[rows, k * h]`.
            visible: bool `[N, rows]`: whether source position r sees a key of a gathered row;
                equal on all ranks.
            placement: of these rows.
            dcp: the group.

        Returns:
            lse `[n, h]`, out `[n, h, Dv]`: the state of this rank's rows and heads over the keys
            of all ranks.

        Raises:
            NumericsError: made strict, and a part that saw keys is NaN or infinite.
        """
        ...


def gather_query(query: torch.Tensor, placement: Placement, groups: RankGroups) -> torch.Tensor:
    """Bring every query that must meet this rank's keys.

    COPY rows are already here for this rank's heads, so only the slice is asked. Where ranks
    project the queries of their whole slice, only the row blocks of other PCP ranks are missing; a
    DCP group with slices spans the whole PCP axis.

    Args:
        query: `[n, h, D]`, or `[n, k * h, D]` where heads are replicated.
        placement: of these rows.
        groups: of this rank.

    Returns:
        `[gathered_rows, k * h, D]`.
    """
    if not placement.has_slice_queries:
        group = groups.slice if placement.is_copy else groups.dcp
        return placement.assemble(group.all_gather(query))
    return query if placement.is_copy else groups.pcp.all_gather(query.contiguous()).flatten(0, 1)
