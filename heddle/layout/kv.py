"""Who stores a token for good: `KVLayout`, the only place where KV ownership is computed.

Runs of `I` tokens are dealt round a DCP group of `N` ranks, starting at rank `u`; with
`j = (r - u) mod N`:

    owner(t)        = (t // I + u) mod N
    local_index(t)  = (t // (N*I)) * I + t mod I
    local_len(L, r) = (L // (N*I)) * I + clip(L mod (N*I) - j*I, 0, I)      rounds + a share
    position(l, r)  = (l // I) * N*I + j*I + l mod I

    N=3 I=2 u=0    t   0 1 | 2 3 | 4 5 || 6 7 | 8 9 | 10 11 || 12 13
              rank 0   0 1 |  .  |  .  || 2 3 |  .  |   .   ||  4  5     local indices
              rank 1    .  | 0 1 |  .  ||  .  | 2 3 |   .   ||   .
              rank 2    .  |  .  | 0 1 ||  .  |  .  |  2  3 ||   .

`local_len` is monotone, so the part of a global range [a, b) that rank r owns is its local range
[local_len(a, r), local_len(b, r)): the *interval law*. Windows, context chunks and visible lengths
all reduce to it.

One virtual block id names a page of `bs` tokens on **every** rank of the group, and so `V = bs * N`
positions. `I` divides `bs`, hence a block holds whole rounds and its offsets are owned as its
positions are.

Local lengths are derived where they are used and never kept: keep the global length and the layout.

Legend: `N` ranks of the DCP group, `I` interleave, `bs` block size, `V` virtual block, `u` start
rank, `L` a global length.
"""

from __future__ import annotations

import hashlib
import operator
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from heddle.errors import ConfigError
from heddle.units import PAD_SLOT_ID

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
AnyInts = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Ownership of one sequence's KV over a DCP group.

    It belongs to a sequence, not to the world. Lengths and positions may be ints or integer arrays;
    arrays give int64 arrays of the same shape.

    Raises:
        ConfigError: a size is not positive, `interleave_size` does not divide `block_size`, or
            `start_rank` is not a rank.
    Source: docs/ownership.md.
    """

    world_size: int
    interleave_size: int
    block_size: int
    start_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("world_size", "interleave_size", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; must be at least 1")
        if self.block_size % self.interleave_size:
            raise ConfigError(
                f"interleave_size={self.interleave_size}; must divide block_size={self.block_size}"
            )
        if not 0 <= self.start_rank < self.world_size:
            raise ConfigError(f"start_rank={self.start_rank}; must be in [0, {self.world_size})")

    @property
    def round_size(self) -> int:
        """`N * I`: positions dealt before ownership repeats."""
        return self.world_size * self.interleave_size

    @property
    def virtual_block_size(self) -> int:
        """`V`: positions that one block id covers."""
        return self.block_size * self.world_size

    @overload
    def owner(self, position: int) -> int: ...
    @overload
    def owner(self, position: AnyInts) -> IntArray: ...
    def owner(self, position: Any) -> Any:
        """Rank of the group that stores a position.

        Example:
            >>> [KVLayout(3, 2, 4).owner(t) for t in range(8)]
            [0, 0, 1, 1, 2, 2, 0, 0]
        """
        position = _natural(position, "position")
        return (position // self.interleave_size + self.start_rank) % self.world_size

    @overload
    def local_index(self, position: int) -> int: ...
    @overload
    def local_index(self, position: AnyInts) -> IntArray: ...
    def local_index(self, position: Any) -> Any:
        """Index of a position among those its owner stores.

        Example:
            >>> [KVLayout(3, 2, 4).local_index(t) for t in range(8)]
            [0, 1, 0, 1, 0, 1, 2, 3]
        """
        position = _natural(position, "position")
        rounds, run = position // self.round_size, position % self.interleave_size
        return rounds * self.interleave_size + run

    @overload
    def local_len(self, length: int, rank: int) -> int: ...
    @overload
    def local_len(self, length: AnyInts, rank: int) -> IntArray: ...
    def local_len(self, length: Any, rank: int) -> Any:
        """Tokens among the first `length` positions that `rank` stores.

        Args:
            length: global tokens, >= 0.
            rank: place in the DCP group, in [0, world_size).
        Returns:
            A count; over ranks it sums to `length` and differs by at most `interleave_size`.
        Raises:
            ValueError: `rank` or `length` is out of range.
        Example:
            >>> [KVLayout(4, 2, 4).local_len(9, rank) for rank in range(4)]
            [3, 2, 2, 2]
        """
        length = _natural(length, "length")
        round_size, run = self.world_size * self.interleave_size, self.interleave_size
        rounds = length // round_size
        share = length - rounds * round_size - self._turn(rank) * run
        return rounds * run + _clip(share, run)

    def local_lens(self, lengths: IntArray) -> IntArray:
        """`local_len` on every rank of the group: `[..., N]` for lengths `[...]`.

        Example:
            >>> KVLayout(4, 2, 4).local_lens(np.array([9, 2])).tolist()
            [[3, 2, 2, 2], [2, 0, 0, 0]]
        """
        lengths = _natural(lengths, "length")[..., None]
        run, round_size = self.interleave_size, self.round_size
        turns = (np.arange(self.world_size, dtype=np.int64) - self.start_rank) % self.world_size
        rounds = lengths // round_size
        found: IntArray = rounds * run + _clip(lengths - rounds * round_size - turns * run, run)
        return found

    @overload
    def global_position(self, index: int, rank: int) -> int: ...
    @overload
    def global_position(self, index: AnyInts, rank: int) -> IntArray: ...
    def global_position(self, index: Any, rank: int) -> Any:
        """Global position of a rank's local index; inverse of (`owner`, `local_index`).

        Example:
            >>> [KVLayout(3, 2, 4).global_position(i, rank=1) for i in range(4)]
            [2, 3, 8, 9]
        """
        index = _natural(index, "index")
        rounds, run = index // self.interleave_size, index % self.interleave_size
        return rounds * self.round_size + self._turn(rank) * self.interleave_size + run

    @overload
    def visible_len(self, position: int, rank: int) -> int: ...
    @overload
    def visible_len(self, position: AnyInts, rank: int) -> IntArray: ...
    def visible_len(self, position: Any, rank: int) -> Any:
        """Local keys that a query at `position` sees on `rank`, its own key included.

        Each row has its own bound. Counting down from the last row's bound is wrong: ownership
        skips.

        Example:
            >>> [KVLayout(2, 2, 4).visible_len(p, rank=0) for p in (4, 5, 6)]
            [3, 4, 4]
        """
        return self.local_len(_natural(position, "position") + 1, rank)

    def max_local_len(self, length: int) -> int:
        """Largest `local_len` over the ranks: that of the start rank, where dealing begins."""
        run = self.interleave_size
        rounds, open_round = divmod(_natural(length, "length"), self.world_size * run)
        longest: int = rounds * run + min(open_round, run)
        return longest

    def holders(self, first: IntArray, end: IntArray) -> BoolArray:
        """Which ranks store a key of each range of positions.

        A range that begins in the run of rank `a` and touches `c` runs meets the ranks
        `a, a + 1, ..., a + c - 1` modulo N, so no rank is asked for its lengths.

        Args:
            first: [R], start of each range, >= 0.
            end: [R], its end; nobody stores anything where `end <= first`.
        Returns:
            [N, R].
        Example:
            >>> KVLayout(3, 2, 4).holders(np.array([1, 3]), np.array([2, 6]))[:, 1].tolist()
            [False, True, True]
        """
        first, end = _natural(first, "first"), _natural(end, "end")
        run = self.interleave_size
        count = np.where(end > first, (end - 1) // run - first // run + 1, 0)
        if count.size and count.min() >= self.world_size:
            return np.ones((self.world_size, len(first)), dtype=np.bool_)
        ranks = np.arange(self.world_size, dtype=np.int64)[:, None]
        found: BoolArray = (ranks - self.owner(first)) % self.world_size < count
        return found

    def local_range(self, start: int, end: int, rank: int) -> tuple[int, int]:
        """Local range of the positions [start, end) that `rank` owns, by the interval law.

        Raises:
            ValueError: not 0 <= start <= end.
        Example:
            >>> KVLayout(3, 2, 4).local_range(3, 9, rank=1)
            (1, 3)
        """
        if end < start:
            raise ValueError(f"end={end}; must be at least start={start}")
        return self.local_len(start, rank), self.local_len(end, rank)

    def num_virtual_blocks(self, length: int) -> int:
        """Block ids that `length` positions need.

        Example:
            >>> [KVLayout(3, 2, 4).num_virtual_blocks(length) for length in (0, 1, 12, 13)]
            [0, 1, 1, 2]
        """
        blocks: int = -(-_natural(length, "length") // self.virtual_block_size)
        return blocks

    def slot(self, position: int, block_table: Sequence[int], rank: int) -> int:
        """Cache slot of one position on `rank`, or `PAD_SLOT_ID` elsewhere; see `slots`.

        Example:
            >>> [KVLayout(3, 2, 4).slot(t, [5, 2], rank=0) for t in (0, 2, 6, 13)]
            [20, -1, 22, 9]
        """
        return int(self.slots(np.asarray([position], dtype=np.int64), block_table, rank)[0])

    def slots(
        self, positions: AnyInts, block_table: Sequence[int] | AnyInts, rank: int
    ) -> IntArray:
        """Cache slots of many positions of one sequence on `rank`.

        Args:
            positions: [T], >= 0, any order.
            block_table: virtual block ids; covers every position, whoever owns it.
            rank: place in the DCP group.
        Returns:
            [T]; `PAD_SLOT_ID` where `rank` is not the owner.
        Raises:
            IndexError: the table is too short for a position (on every rank alike).
            ValueError: `rank` or a position is out of range.
        """
        positions = _natural(positions, "position")
        pages = np.asarray(block_table)[positions // self.virtual_block_size].astype(np.int64)
        return self.slots_in(pages, positions, rank)

    def slots_in(self, pages: IntArray, positions: AnyInts, rank: int) -> IntArray:
        """Cache slots of positions whose pages are known; see `slots`.

        Args:
            pages: [T], block id of each position's block.
            positions: [T], >= 0, of any sequences with this layout.
            rank: place in the DCP group.
        """
        mine = (positions // self.interleave_size) % self.world_size == self._turn(rank)
        stored = pages * self.block_size + self.local_index(positions) % self.block_size
        return np.where(mine, stored, np.int64(PAD_SLOT_ID))

    def fingerprint(self, num_slices: int, kv_dtype: str) -> int:
        """A 64-bit name of everything that fixes what a cached byte means.

        Objects made for one layout carry it; a consumer with another one refuses them.

        Args:
            num_slices: `A`, ways in which kv heads are cut.
            kv_dtype: name of the stored element type.
        """
        sizes = (self.world_size, self.interleave_size, self.block_size, self.start_rank)
        message = struct.pack("<5Q", *sizes, num_slices) + kv_dtype.encode()
        return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little")

    def _turn(self, rank: int) -> int:
        """`j`: how many ranks are dealt to before this one."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank}; must be in [0, {self.world_size})")
        return (rank - self.start_rank) % self.world_size


def _natural(value: Any, name: str) -> Any:
    """The value as int or int64 array (narrower products would wrap), once known to be >= 0."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "iu":
            raise TypeError(f"{name} has dtype {value.dtype}; must be integers")
        value = value.astype(np.int64, copy=False)
        smallest = value.min() if value.size else 0
    else:
        value = operator.index(value)
        smallest = value
    if smallest < 0:
        raise ValueError(f"{name}={smallest}; must be at least 0")
    return value


def _clip(value: Any, high: int) -> Any:
    """The value within [0, high]."""
    if isinstance(value, np.ndarray):
        return np.minimum(np.maximum(value, 0), high)  # `np.clip` asks for the limits of the type
    return min(max(value, 0), high)
