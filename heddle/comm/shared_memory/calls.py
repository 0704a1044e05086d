"""What a collective needs to know about its tensor, worked out once for each shape.

Tensors of the shapes of a decode step come again thousands of times. Their views of the boxes are
made at the first call and kept, so that a later call is little more than a copy in, a number and a
copy out.

Legend: `N` ranks in the group in hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from heddle.comm.blocks import is_narrow, require_blocks, sum_in_order
from heddle.comm.rendezvous import Call
from heddle.comm.shared_memory.geometry import BOX_BYTES
from heddle.comm.shared_memory.segment import digest_of

Pair = tuple[torch.Tensor, torch.Tensor]
"""One for each of the two boxes."""
Key = tuple[str, torch.Size, torch.dtype]
MOST_KEPT = 512
"""Shapes; prefill chunks may have many."""


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """One collective on tensors of one shape and dtype."""

    words: str
    digest: int
    flat: tuple[int, ...]
    """Shape as one row of items, or as one for each rank."""
    is_empty: bool
    """There is nothing to move."""
    adds_plainly: bool = False
    """A sum is one addition without a conversion."""
    own: Pair | None = None
    """Views of this rank's boxes, like the tensor itself; None where it does not fit."""
    received: Pair | None = None
    """Views [N, ...] of what every rank has for this one."""
    blocks: tuple[tuple[torch.Tensor, ...], ...] = ()
    """The same, one by one."""

    def sum(self, parity: int) -> torch.Tensor:
        """Sum of the blocks in one of the boxes, in group order."""
        blocks = self.blocks[parity]
        if self.adds_plainly:
            return torch.add(*blocks)
        return sum_in_order(blocks)


class Boxes:
    """The boxes of a group's members, as tensors."""

    def __init__(self, first: torch.Tensor, second: torch.Tensor, place: int) -> None:
        """Look at them.

        Args:
            first, second: [N, BOX_BYTES] of uint8, for even and odd rounds.
            place: this rank's.
        """
        self.both: Pair = (first, second)
        self.place = place
        self.world_size = first.shape[0]

    def views(self, parity: int, low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
        """Bytes `low` to `high` of every member's box: [N, (high - low) / item size]."""
        return self.both[parity][:, low:high].view(dtype)


class Calls:
    """The prepared calls of one group."""

    def __init__(self, boxes: Boxes, members: str) -> None:
        """Nothing is prepared yet; `members` makes digests of differing groups differ."""
        self._boxes = boxes
        self._members = members
        self._known: dict[Key, PreparedCall] = {}

    def of(self, op: str, tensor: torch.Tensor, is_dealt: bool) -> PreparedCall:
        """The call of `op` on such a tensor.

        Args:
            op: name.
            tensor: the input.
            is_dealt: its leading axis counts ranks, and each gets its own block.
        Raises:
            ValueError: that axis does not.
        """
        key = (op, tensor.shape, tensor.dtype)
        known = self._known.get(key)
        if known is None:
            if is_dealt:
                require_blocks(op, tensor, self._boxes.world_size)
            if len(self._known) >= MOST_KEPT:
                self._known.clear()
            known = self._known[key] = self._prepare(op, tensor, is_dealt)
        return known

    def _prepare(self, op: str, tensor: torch.Tensor, is_dealt: bool) -> PreparedCall:
        shape, dtype = tensor.shape, tensor.dtype
        words = Call(op, tuple(shape), str(dtype)).words
        digest = digest_of(f"{words} {self._members}")
        num_bytes = tensor.numel() * dtype.itemsize
        flat = (shape[0], -1) if is_dealt else (-1,)
        if num_bytes > BOX_BYTES:
            return PreparedCall(words, digest, flat, is_empty=False)
        boxes = self._boxes
        block = shape[1:] if is_dealt else shape
        low, high = 0, num_bytes
        if is_dealt:
            low = boxes.place * (num_bytes // boxes.world_size)
            high = low + num_bytes // boxes.world_size

        def received(parity: int) -> torch.Tensor:
            return boxes.views(parity, low, high, dtype).view(boxes.world_size, *block)

        def own(parity: int) -> torch.Tensor:
            return boxes.views(parity, 0, num_bytes, dtype)[boxes.place].view(shape)

        pair = _both(received)
        blocks = tuple(half.unbind(0) for half in pair)
        plainly = boxes.world_size == 2 and not is_narrow(dtype)
        return PreparedCall(words, digest, flat, num_bytes == 0, plainly, _both(own), pair, blocks)


def _both(make: Callable[[int], torch.Tensor]) -> Pair:
    return make(0), make(1)
