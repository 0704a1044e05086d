"""Collectives on tensors larger than a box: the same rounds, one part after another.

With two boxes a quick rank fills the next part while a slow one still reads this one. Sums are made
straight from the boxes, in group order. An all-reduce of two ranks sums all of a part on both; of
more, each rank sums its share and a second round gathers the shares: every rank then reads about
two parts, and not N.

Legend: `N` ranks in the group in hand; `flat` tensors are contiguous, [items] or [N, items].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from heddle.comm.blocks import sum_in_order
from heddle.comm.shared_memory.calls import Boxes
from heddle.comm.shared_memory.geometry import BOX_BYTES


class Round(Protocol):
    """Ends a round of the call in hand."""

    def __call__(self) -> None:
        """Show this rank's box, and wait for the others'."""
        ...


class Streams:
    """The long collectives of one group; the caller counts rounds, these ask for their number."""

    def __init__(self, boxes: Boxes) -> None:
        self._boxes = boxes
        self._size = boxes.world_size
        self._place = boxes.place

    def gather(self, flat: torch.Tensor, parity: int, end_round: Round) -> torch.Tensor:
        """[items] of each rank -> [N, items].

        Args:
            flat: this rank's.
            parity: of the first round, 0 or 1.
            end_round: of this call.
        """
        out = flat.new_empty((self._size, flat.numel()))
        for low, high in _parts(flat.numel(), self._capacity(flat)):
            views = self._views(parity, high - low, flat)
            views[self._place].copy_(flat[low:high])
            end_round()
            out[:, low:high].copy_(views)
            parity ^= 1
        return out

    def deal(self, flat: torch.Tensor, parity: int, end_round: Round) -> torch.Tensor:
        """[N, items] -> [N, items]: row d goes to rank d. Arguments as of `gather`."""
        out = torch.empty_like(flat)
        for low, high, received in self._dealt(flat, parity, end_round):
            for row, block in enumerate(received):
                out[row, low:high].copy_(block)
        return out

    def scatter_sum(self, flat: torch.Tensor, parity: int, end_round: Round) -> torch.Tensor:
        """[N, items] -> [items]: the sum over ranks of the row for this one."""
        out = flat.new_empty(flat.shape[1])
        for low, high, received in self._dealt(flat, parity, end_round):
            sum_in_order(received, out[low:high])
        return out

    def sum(self, flat: torch.Tensor, parity: int, end_round: Round) -> torch.Tensor:
        """[items] -> [items]: the sum over ranks, on all of them."""
        out = torch.empty_like(flat)
        for low, high in _parts(flat.numel(), self._capacity(flat)):
            views = self._views(parity, high - low, flat)
            views[self._place].copy_(flat[low:high])
            end_round()
            parity ^= 1
            if self._size == 2:
                sum_in_order(views.unbind(0), out[low:high])
                continue
            self._sum_shares(out[low:high], views, parity, end_round)
            parity ^= 1
        return out

    def _sum_shares(
        self, out: torch.Tensor, views: torch.Tensor, parity: int, end_round: Round
    ) -> None:
        """Sum this rank's share of a part, gather everybody's."""
        share = -(-out.numel() // self._size)
        spans = [
            slice(share * place, max(share * place, min(share * (place + 1), out.numel())))
            for place in range(self._size)
        ]
        mine = spans[self._place]
        sums = self._views(parity, share, out)
        summed = sum_in_order(views[:, mine].unbind(0))
        sums[self._place][: summed.numel()].copy_(summed)
        end_round()
        for place, span in enumerate(spans):
            target = out[span]
            target.copy_(sums[place][: target.numel()])

    def _dealt(
        self, flat: torch.Tensor, parity: int, end_round: Round
    ) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
        """(low, high, what each rank has for this one), part after part; its own stays here."""
        place = self._place
        for low, high in _parts(flat.shape[1], self._capacity(flat) // self._size):
            width = high - low
            views = self._views(parity, self._size * width, flat)
            boxes = views.view(self._size, self._size, width)  # [from, to, items]
            boxes[place, :place].copy_(flat[:place, low:high])
            boxes[place, place + 1 :].copy_(flat[place + 1 :, low:high])
            end_round()
            blocks = list(boxes[:, place].unbind(0))
            blocks[place] = flat[place, low:high]
            yield low, high, blocks
            parity ^= 1

    def _capacity(self, flat: torch.Tensor) -> int:
        return BOX_BYTES // flat.dtype.itemsize

    def _views(self, parity: int, items: int, flat: torch.Tensor) -> torch.Tensor:
        return self._boxes.views(parity, 0, items * flat.dtype.itemsize, flat.dtype)


def _parts(num_items: int, most: int) -> Iterator[tuple[int, int]]:
    """Ranges that cover [0, num_items).

    Example:
        >>> list(_parts(5, 2))
        [(0, 2), (2, 4), (4, 5)]
    """
    for low in range(0, num_items, most):
        yield low, min(low + most, num_items)
