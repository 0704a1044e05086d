"""This rank's place among the tensor-parallel ranks, and the cut of a dimension between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from heddle.comm.base import Communicator


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's view of the weight split: sums are over `tp`."""

    rank: int
    size: int
    tp: Communicator

    def cut(self, count: int) -> tuple[int, int]:
        """This rank's half-open range of `count` units."""
        return cut(count, self.size, self.rank)

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's partial, same on all ranks; nothing is said in a group of one."""
        return partial if self.size == 1 else self.tp.all_reduce(partial)


def cut(count: int, size: int, rank: int) -> tuple[int, int]:
    """Range of `count` units that `rank` of `size` ranks holds: from `floor(count*rank/size)`.

    Any count is legal; shares differ by at most one unit.

    Example:
        >>> [cut(10, 4, rank) for rank in range(4)]
        [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    return count * rank // size, count * (rank + 1) // size
