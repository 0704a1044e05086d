"""The pool of virtual blocks: every change of a block's state, in one class.

             allocate                release, content known
      free ------------> owned n ----------------------------> cached
       ^                 |  ^  |                                 |  |
       |   release       |  |  +-- share: n + 1                  |  |
       +-----------------+  +------------ share -----------------+  |
       +--------------------------- evict (LRU) --------------------+

A block id names one page on every rank of a DCP group, so these states are global facts and a free
count is one number. A block's hash belongs to its state: it is attached by `register` while the
block is owned, and dropped by `evict` before the block gets another owner. Block 0 is never given
out: pads may point at it.
"""

from __future__ import annotations

from collections import OrderedDict

from heddle.errors import KVCacheFull
from heddle.kvcache.prefix import Node, PrefixIndex
from heddle.kvcache.runs import FreeRuns


class BlockPool:
    """Reference counts, free ids and the eviction order.

    Args:
        num_blocks: virtual blocks, block 0 included.
        index: what cached and owned blocks hold; changed through this pool only.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self._index = index
        self._references = [0] * num_blocks
        self._free = FreeRuns(1, num_blocks)
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._suspect: set[int] = set()  # owned, wiped when the last owner leaves
        self._to_wipe: list[int] = []
        self._freed: list[int] | None = None

    @property
    def num_usable(self) -> int:
        """Blocks that can be given out at all."""
        return max(len(self._references) - 1, 0)

    @property
    def num_cached(self) -> int:
        """Blocks without an owner whose content can be found."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could give now: free or evictable."""
        return len(self._free) + len(self._cached)

    def references(self, block: int) -> int:
        """Owners of a block."""
        return self._references[block]

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Give `count` blocks to one owner, evicting least recently used cached ones if need be.

        Args:
            count: blocks wanted.
            after: last block of the table that grows; its successor is preferred.
        Raises:
            KVCacheFull: fewer are available; nothing has changed.
        """
        if count > self.num_available:
            raise KVCacheFull(
                f"{count} blocks wanted, {self.num_available} of {self.num_usable} available"
            )
        while len(self._free) < count:
            self._evict()
        blocks = self._free.take(count, after)
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """Add an owner to a block that is owned or cached."""
        assert self._references[block] or block in self._cached, f"block {block} holds nothing"
        self._cached.pop(block, None)
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Take one owner away; the last one leaves the block cached if its content is known."""
        assert self._references[block], f"block {block} has no owner"
        self._references[block] -= 1
        if self._references[block]:
            return
        if block in self._index:
            self._cached[block] = None
            return
        self._free_one(block)
        if block in self._suspect:
            self._suspect.remove(block)
            self._to_wipe.append(block)

    def register(self, block: int, node: Node) -> None:
        """Attach content to an owned block whose last write has ended; kept only if it is news."""
        assert self._references[block], f"block {block} has no owner"
        if block not in self._index and block not in self._suspect:
            self._index.insert(block, node)

    def quarantine(self, block: int) -> None:
        """Distrust an owned block: no longer found, and wiped before it is reused."""
        assert self._references[block], f"block {block} has no owner"
        if block in self._index:
            self._index.drop(block)
        self._suspect.add(block)

    def take_to_wipe(self) -> tuple[int, ...]:
        """Blocks to overwrite with zeros before the next step writes; each is told once."""
        blocks, self._to_wipe = tuple(self._to_wipe), []
        return blocks

    def note_freed(self) -> None:
        """From now on remember which blocks become free, for `take_freed`."""
        self._freed = []

    def take_freed(self) -> tuple[int, ...]:
        """Blocks that have become free, each told once; none unless they are noted. Those given out
        again since are among them.
        """
        blocks = tuple(dict.fromkeys(self._freed or ()))
        if self._freed is not None:
            self._freed = []
        return blocks

    def forget_all(self) -> None:
        """Drop all content: cached blocks become free, owned ones can no longer be found."""
        while self._cached:
            self._evict()
        for block, count in enumerate(self._references):
            if count and block in self._index:
                self._index.drop(block)

    def _evict(self) -> None:
        block, _ = self._cached.popitem(last=False)
        self._index.evict(block)
        self._free_one(block)

    def _free_one(self, block: int) -> None:
        self._free.add(block)
        if self._freed is not None:
            self._freed.append(block)

    def audit(self) -> None:
        """Check that every block is free, cached or owned, counted once.

        Raises:
            AssertionError: names the first block or count that is wrong.
        """
        for block in range(1, len(self._references)):
            states = (block in self._free, block in self._cached, self._references[block] > 0)
            _check(sum(states) == 1, f"block {block} is (free, cached, owned) = {states}")
            _check(not (states[0] and block in self._index), f"free block {block} can be found")
            _check(not (states[1] and block not in self._index), f"cached {block} cannot be found")
            _check(states[2] or block not in self._suspect, f"suspect {block} has no owner")
        _check(self._references[:1] in ([], [0]), "block 0 has an owner")
        _check(0 not in self._free and 0 not in self._index, "block 0 was given out")
        owned = sum(1 for count in self._references if count)
        total = len(self._free) + len(self._cached) + owned
        _check(total == self.num_usable, f"{total} blocks are accounted for of {self.num_usable}")


def _check(holds: bool, message: str) -> None:
    """Like `assert`, and still there when Python runs with -O."""
    if not holds:
        raise AssertionError(message)
