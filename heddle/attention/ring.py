"""Round the ring: each rank's tensor visits all others, and the next one travels meanwhile.

    hop      0       1       2       3          rank 1 of 4
    meets    own 1   of 0    of 3    of 2
    on its   0 ->    3 ->    2 ->
    way here

Legend: `N` ranks of the group.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from heddle.comm.base import Communicator


def visitors(group: Communicator, own: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Every rank's tensor with its place in the group, this rank's own first: `N - 1` shifts.

    A transfer is under way while its predecessor is worked on, so it costs nothing as long as it is
    the shorter of the two.

    Args:
        group: the ring; all ranks must take every visitor.
        own: equal shape and dtype on all ranks; it may not change before the last visitor.
    """
    tensor = own
    for hop in range(group.world_size):
        pending = group.shift(tensor) if hop + 1 < group.world_size else None
        yield (group.rank - hop) % group.world_size, tensor
        if pending is not None:
            tensor = pending.wait()
