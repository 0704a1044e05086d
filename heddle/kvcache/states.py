"""Slots of recurrent states: who owns them, and which hold a snapshot that others may resume.

      free <----------- owned by a sequence ----- ends, content known ---> snapshot
       ^ \\                    ^                                             |
       |  +---- allocate -----+------------- evict (LRU), allocate ---------+
       +------------------------------- forget ------------------------------+

A state belongs to exactly one prefix: unlike blocks, it is of no use for a shorter or longer one. A
snapshot is named by the key of the tokens up to the last unit border, and the tokens after it.

A slot may change hands while a step still reads it: ranks do steps and copies in the order in which
they were made. Slot 0 is never given out: it stands for zeros.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from heddle.kvcache.chain import BlockChain, block_tokens
from heddle.kvcache.children import Tokens


class Prefix(NamedTuple):
    """The tokens that a state has seen."""

    parent: bytes
    """Key of the tokens up to the last unit border."""
    tail: Tokens
    """Tokens after it, fewer than a unit."""


class StatePool:
    """Free slots, and snapshots in the order of their eviction.

    Args:
        num_slots: slot 0 included; 0: the model has no recurrent layers.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(range(num_slots - 1, 0, -1))
        self._snapshots: OrderedDict[int, Prefix] = OrderedDict()  # least recently used first
        self._by_parent: dict[bytes, dict[Tokens, int]] = {}

    @property
    def num_usable(self) -> int:
        """Slots that can be given out at all."""
        return max(self._num_slots - 1, 0)

    @property
    def num_available(self) -> int:
        """Slots that `allocate` could give now: free, or a snapshot."""
        return len(self._free) + len(self._snapshots)

    @property
    def num_snapshots(self) -> int:
        """States that can be resumed."""
        return len(self._snapshots)

    def allocate(self, count: int) -> list[int]:
        """Give `count <= num_available` slots to one owner."""
        assert count <= self.num_available, f"{count} state slots wanted, {self.num_available} left"
        while len(self._free) < count:
            self._forget(next(iter(self._snapshots)))
        return [self._free.pop() for _ in range(count)]

    def give_back(self, slots: Iterable[int]) -> None:
        """Owned slots become free."""
        self._free.extend(slots)

    def keep(self, slot: int, prefix: Prefix) -> None:
        """An owned slot becomes a snapshot, unless there is one of this prefix."""
        if self.touch(prefix):
            self._free.append(slot)
            return
        self._snapshots[slot] = prefix
        self._by_parent.setdefault(prefix.parent, {})[prefix.tail] = slot

    def touch(self, prefix: Prefix) -> int:
        """Slot of the snapshot of exactly this prefix, now the last to be evicted; 0: none."""
        slot = self._by_parent.get(prefix.parent, {}).get(prefix.tail, 0)
        if slot:
            self._snapshots.move_to_end(slot)
        return slot

    def resume(self, slot: int) -> Prefix:
        """Prefix of a snapshot, now the last to be evicted."""
        self._snapshots.move_to_end(slot)
        return self._snapshots[slot]

    def longest(self, parent: bytes, tokens: Tokens) -> tuple[int, int]:
        """(slot, tokens after the border) of the longest snapshot that `tokens` begin with; slot 0:
        none.
        """
        best = (0, 0)
        for tail, slot in self._by_parent.get(parent, {}).items():
            if (len(tail) > best[1] or not best[0]) and tokens[: len(tail)] == tail:
                best = (slot, len(tail))
        return best

    def forget(self, prefixes: Collection[Prefix]) -> None:
        """Drop the snapshots of these prefixes, which are not to be trusted."""
        for prefix in prefixes:
            slot = self.touch(prefix)
            if slot:
                self._forget(slot)

    def forget_all(self) -> None:
        """Drop all snapshots."""
        while self._snapshots:
            self._forget(next(iter(self._snapshots)))

    def audit(self, owned: Sequence[int]) -> None:
        """Check that each slot is free, owned once or a snapshot.

        Raises:
            AssertionError: names the slots.
        """
        found = sorted([*self._free, *self._snapshots, *owned])
        if found != list(range(1, self._num_slots)):
            raise AssertionError(f"state slots {found}, of 1 to {self.num_usable}")
        named = {slot for tails in self._by_parent.values() for slot in tails.values()}
        if named != set(self._snapshots):
            raise AssertionError(f"snapshots {sorted(self._snapshots)}, findable {sorted(named)}")

    def _forget(self, slot: int) -> None:
        prefix = self._snapshots.pop(slot)
        tails = self._by_parent[prefix.parent]
        del tails[prefix.tail]
        if not tails:
            del self._by_parent[prefix.parent]
        self._free.append(slot)


class StateLookup:
    """The snapshots of a prompt.

    Args:
        pool: of the snapshots.
        chain: names of the prompt's units; learns keys.
        unit: tokens between two borders.
        tokens: of the prompt.
    """

    def __init__(
        self, pool: StatePool, chain: BlockChain, unit: int, tokens: Sequence[int]
    ) -> None:
        self._pool, self._chain, self._unit, self._tokens = pool, chain, unit, tokens

    def best(self, end: int) -> int:
        """Tokens of the longest snapshot of at most `end` tokens; 0: none."""
        return self.find(end)[1]

    def find(self, end: int) -> tuple[int, int]:
        """(slot, tokens) of the longest snapshot of at most `end` tokens; (0, 0): none."""
        if not self._pool.num_snapshots:
            return 0, 0
        self._chain.learn_keys(self._tokens, self._unit, end)
        for index in range(end // self._unit, -1, -1):
            piece = block_tokens(self._tokens, index, self._unit, end)
            slot, shared = self._pool.longest(self._chain.parent_key(index), piece)
            if slot:
                return slot, index * self._unit + shared
        return 0, 0
