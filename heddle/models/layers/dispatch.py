"""Rows travel to the ranks that hold their experts, and weighted sums travel back.

    counts   every rank tells how many rows it sends to each, so all know the largest number m
    out      a row goes once to each rank that holds one of its experts, with all ids and weights
    back     each of those ranks returns one sum per row; they are added in order of ranks

Experts are dealt in ascending order, so a row's sum is formed in order of expert ids, as on one
rank. Ids and weights are float32 or float64 and lie behind the row, bit by bit, whatever its dtype:
one exchange instead of two.

Legend: `N` EP ranks, `n` rows of this rank, `E` hidden size, `X` experts, `k` experts per row,
`m` largest number of rows between two ranks, `a` rows that arrive here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from heddle.comm.base import Communicator


@dataclass(frozen=True, slots=True, eq=False)
class Arrivals:
    """Rows of all ranks that visit an expert of this one."""

    rows: torch.Tensor  # [a, E]
    experts: torch.Tensor  # [a, k] int64; those of other ranks, too
    weights: torch.Tensor  # [a, k]


class Dispatch:
    """One trip of rows to their experts and back. Every rank of the group makes the same calls."""

    def __init__(self, ep: Communicator, experts: torch.Tensor, num_experts: int) -> None:
        """Settle who goes where; one all-gather.

        Args:
            ep: holders of the experts.
            experts: `[n, k]` ids below `num_experts`.
            num_experts: `X`.
        """
        self._ep = ep
        self._experts = experts
        visited = _visited(experts, num_experts, ep.world_size)
        self._counts = ep.all_gather(visited.sum(dim=1))  # [N, N]: from, to
        own = self._counts[ep.rank]
        self._target, self._row = visited.nonzero(as_tuple=True)  # by target, then by row
        starts = own.cumsum(0) - own
        self._place = torch.arange(len(self._row)) - starts[self._target]
        # Without any row the calls are made all the same, and no library must cope with no bytes.
        self._room = max(1, int(self._counts.max()))
        arriving = self._counts[:, ep.rank, None]
        self._arrived = torch.arange(self._room) < arriving  # [N, m]

    def send(self, rows: torch.Tensor, weights: torch.Tensor) -> Arrivals:
        """Hand out this rank's rows and take in those of others.

        Args:
            rows: `[n, E]`.
            weights: `[n, k]`, float32 or float64.
        """
        tags = torch.cat((self._experts.to(weights.dtype), weights), dim=1)
        tagged = torch.cat((rows, tags.view(rows.dtype)), dim=1)
        blocks = tagged.new_zeros(self._ep.world_size, self._room, tagged.shape[1])
        blocks[self._target, self._place] = tagged[self._row]
        arrived = self._ep.all_to_all(blocks)[self._arrived]
        hidden, tail = arrived.tensor_split((rows.shape[1],), dim=1)
        experts, own_weights = tail.contiguous().view(weights.dtype).chunk(2, dim=1)
        return Arrivals(hidden.contiguous(), experts.to(torch.int64), own_weights)

    def collect(self, sums: torch.Tensor) -> torch.Tensor:
        """Return what was computed for the rows that arrived, and add up what was for one's own.

        Args:
            sums: `[a, E]`, in the order of arrival.
        Returns:
            `[n, E]` in the dtype of the sums.
        """
        blocks = sums.new_zeros(self._ep.world_size, self._room, sums.shape[1])
        blocks[self._arrived] = sums
        returned = self._ep.all_to_all(blocks)
        total = sums.new_zeros(len(self._experts), sums.shape[1])
        for source in range(self._ep.world_size):
            rows = self._row[self._target == source]
            total.index_add_(0, rows, returned[source, : len(rows)])
        return total


def _visited(experts: torch.Tensor, num_experts: int, num_ranks: int) -> torch.Tensor:
    """`[N, n]`: a row visits an expert of a rank."""
    # floor(X*r/N) <= e for r up to ceil(N*(e+1)/X) - 1, which is the rank that holds expert e.
    holders = ((experts + 1) * num_ranks - 1) // num_experts
    visited = torch.zeros(num_ranks, len(experts), dtype=torch.bool)
    rows = torch.arange(len(experts))[:, None].expand_as(holders)
    visited[holders, rows] = True
    return visited
