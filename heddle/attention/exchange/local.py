"""A group of one: the partial is the whole."""

from __future__ import annotations

import torch

from heddle.attention.exchange.placement import Placement
from heddle.attention.state import AttentionState
from heddle.comm.base import Communicator


class LocalExchange:
    """Returns its input."""

    name = "local"

    def merge(
        self,
        state: AttentionState,
        visible: torch.Tensor,  # noqa: ARG002 - the backend has already written nil
        placement: Placement,
        dcp: Communicator,
    ) -> AttentionState:
        """See `Exchange.merge`.

        Raises:
            ValueError: the group has more than one member.
        """
        if dcp.world_size != 1 or placement.world_size != 1:
            raise ValueError(
                f"exchange 'local' in a group of {dcp.world_size}; it merges nothing, so the group "
                "must have 1 member; 'ag_rs', 'ag_ar' and 'a2a' merge"
            )
        return state
