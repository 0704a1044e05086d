"""What differs between passes that do the same: memory that each next pass takes over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Follower(Protocol):
    """Memory that kernels find by its address, and that can take over what another one says."""

    def follow(self, other: Any) -> None:
        """Say what `other`, of the same type, says; it outlives the next repetition."""
        ...


Input = torch.Tensor | Follower


def take_over(kept: Sequence[Input], new: Sequence[Input]) -> None:
    """Copy the inputs of a pass into the memory of those that were noted.

    Args:
        kept: what the notes read.
        new: as many, of the same shapes and types.
    """
    for mine, given in zip(kept, new, strict=True):
        if isinstance(mine, torch.Tensor):
            assert isinstance(given, torch.Tensor), "inputs of a key are alike"
            mine.copy_(given)
        else:
            mine.follow(given)
