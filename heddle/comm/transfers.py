"""What the transfers between two ranks share, whatever carries them.

A ring is the group's order closed: everybody sends to the next place and receives from the one
before.

Legend: `N` ranks in the group in hand.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class Transfer:
    """A `Pending` that ends by a call; afterwards it holds no buffer."""

    def __init__(self, take: Callable[[], torch.Tensor]) -> None:
        self._take: Callable[[], torch.Tensor] | None = take

    def wait(self) -> torch.Tensor:
        """What arrived; see `Pending.wait`."""
        take, self._take = self._take, None
        assert take is not None, "a transfer is waited for exactly once"
        return take()


def ring_neighbours(place: int, world_size: int) -> tuple[int, int]:
    """The places that a shift receives from and sends to.

    Example:
        >>> ring_neighbours(0, 4)
        (3, 1)
    """
    return (place - 1) % world_size, (place + 1) % world_size


def require_peer(op: str, peer: int, place: int, world_size: int) -> None:
    """Refuse a peer that is no other member of the group.

    Raises:
        ValueError: `peer` is the caller's own place or outside the group.
    """
    if peer == place or not 0 <= peer < world_size:
        others = [other for other in range(world_size) if other != place]
        raise ValueError(
            f"{op} on rank {place} names rank {peer}; it must be another rank of the group: "
            f"{others or 'this one has none'}"
        )
