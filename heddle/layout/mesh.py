"""Rank <-> coordinate, and the groups of ranks that talk.

The world is `ExternalDP x DP x PP x PCP x TP`, slowest axis first:

    rank = (((external_dp * DP + dp) * PP + pp) * PCP + pcp) * TP + tp

DCP is no axis of it. It is a view of the TP x PCP plane, walked PCP first and then TP:

    y = tp * PCP + pcp;   DCP group = y // dcp;   place in the group r = y mod dcp

          tp=0  tp=1  tp=2  tp=3      groups of TP4 x PCP2
    pcp=0  R0    R1    R2    R3       tp     [R0 R1 R2 R3] [R4 R5 R6 R7]
    pcp=1  R4    R5    R6    R7       pcp    [R0 R4] [R1 R5] [R2 R6] [R3 R7]
                                      dcp 4  [R0 R4 R1 R5] [R2 R6 R3 R7]
                                      slice  [R0 R1] [R2 R3] [R4 R5] [R6 R7]   (of dcp 4)

A legal DCP group is a rectangle of that plane: `P' = min(pcp, dcp)` rows by `k = max(1, dcp / pcp)`
columns. Its k members of one row are a *slice* group: they store the same kv heads and exchange
query heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from heddle.errors import TopologyError

GroupKind = Literal["tp", "pcp", "dcp", "slice"]
GROUP_KINDS: tuple[GroupKind, ...] = ("tp", "pcp", "dcp", "slice")


def divisors(size: int) -> tuple[int, ...]:
    """All divisors of a positive size, ascending."""
    low = [part for part in range(1, math.isqrt(size) + 1) if size % part == 0]
    return tuple(sorted({*low, *(size // part for part in low)}))


def legal_dcp_sizes(tp_size: int, pcp_size: int) -> tuple[int, ...]:
    """DCP sizes whose groups are rectangles of the TP x PCP plane, ascending.

    These are the divisors of PCP, and PCP times a divisor of TP.

    Example:
        >>> legal_dcp_sizes(tp_size=4, pcp_size=3)
        (1, 3, 6, 12)
    """
    across = {pcp_size * size for size in divisors(tp_size)}
    return tuple(sorted(across.union(divisors(pcp_size))))


@dataclass(frozen=True, slots=True)
class Coord:
    """Place of a rank on every axis, slowest first."""

    external_dp: int
    dp: int
    pp: int
    pcp: int
    tp: int


class _Place(NamedTuple):
    """Where a rank sits among the groups of one kind."""

    group: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Sizes of the axes, and everything that follows from them.

    Raises:
        TopologyError: a size is not positive, or DCP groups would not be rectangles.
    """

    tp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    external_dp_size: int = 1

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise TopologyError([f"{name}={getattr(self, name)}; a size is at least 1"])
        legal = legal_dcp_sizes(self.tp_size, self.pcp_size)
        if self.dcp_size not in legal:
            raise TopologyError(
                [
                    f"dcp_size={self.dcp_size} is not legal with tp_size={self.tp_size}, "
                    f"pcp_size={self.pcp_size}; legal here: {', '.join(map(str, legal))}"
                ]
            )

    @property
    def world_size(self) -> int:
        """Ranks in all; DCP adds none."""
        return self._num_planes * self.pcp_size * self.tp_size

    @property
    def num_replicas(self) -> int:
        """`P'`: PCP coordinates inside one DCP group."""
        return min(self.pcp_size, self.dcp_size)

    @property
    def slice_size(self) -> int:
        """`k`: TP ranks inside one DCP group."""
        return max(1, self.dcp_size // self.pcp_size)

    @property
    def num_slices(self) -> int:
        """`A`: ways in which kv heads are cut over the TP axis."""
        return self.tp_size // self.slice_size

    @property
    def _num_planes(self) -> int:
        return self.external_dp_size * self.dp_size * self.pp_size

    def slice_of(self, tp_rank: int) -> int:
        """Index of the slice whose kv heads a TP rank stores, in [0, num_slices)."""
        if not 0 <= tp_rank < self.tp_size:
            raise ValueError(f"tp_rank={tp_rank}; must be in [0, {self.tp_size})")
        return tp_rank // self.slice_size

    def coord_of(self, rank: int) -> Coord:
        """Coordinates of a global rank.

        Raises:
            ValueError: the rank is outside the world.
        Example:
            >>> Mesh(tp_size=4, pcp_size=2).coord_of(5)
            Coord(external_dp=0, dp=0, pp=0, pcp=1, tp=1)
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank}; must be in [0, {self.world_size})")
        rest, tp = divmod(rank, self.tp_size)
        rest, pcp = divmod(rest, self.pcp_size)
        rest, pp = divmod(rest, self.pp_size)
        external_dp, dp = divmod(rest, self.dp_size)
        return Coord(external_dp, dp, pp, pcp, tp)

    def rank_of(self, coord: Coord) -> int:
        """Global rank at a coordinate; inverse of `coord_of`.

        Raises:
            ValueError: a coordinate is outside its axis.
        """
        for axis in coord.__slots__:
            place, size = getattr(coord, axis), getattr(self, f"{axis}_size")
            if not 0 <= place < size:
                raise ValueError(f"{axis}={place}; must be in [0, {size})")
        return (self._plane_of(coord) * self.pcp_size + coord.pcp) * self.tp_size + coord.tp

    def groups(self, kind: GroupKind) -> tuple[tuple[int, ...], ...]:
        """All groups of a kind, each an ordered list of global ranks; together they tile the world.

        Example:
            >>> Mesh(tp_size=2, pcp_size=4, dcp_size=2).groups("dcp")
            ((0, 2), (4, 6), (1, 3), (5, 7))
        """
        places = sorted((self._place(kind, rank), rank) for rank in range(self.world_size))
        members: dict[int, list[int]] = {}
        for place, rank in places:
            members.setdefault(place.group, []).append(rank)
        return tuple(tuple(ranks) for ranks in members.values())

    def group_of(self, kind: GroupKind, rank: int) -> tuple[int, ...]:
        """The group of a kind that holds a global rank, in its order."""
        return self.groups(kind)[self._place(kind, rank).group]

    def position(self, kind: GroupKind, rank: int) -> int:
        """Place of a global rank in its group's ordered list.

        In a DCP group, `position % num_replicas` is the block of rows that the rank owns and
        `position // num_replicas` the block of heads.
        """
        return self._place(kind, rank).position

    def _plane_of(self, coord: Coord) -> int:
        """Index of the TP x PCP plane that holds a coordinate."""
        return (coord.external_dp * self.dp_size + coord.dp) * self.pp_size + coord.pp

    def _place(self, kind: GroupKind, rank: int) -> _Place:
        coord = self.coord_of(rank)
        plane = self._plane_of(coord)
        if kind == "tp":
            return _Place(plane * self.pcp_size + coord.pcp, coord.tp)
        if kind == "pcp":
            return _Place(plane * self.tp_size + coord.tp, coord.pcp)
        if kind == "dcp":
            # The plane's size is a multiple of dcp, so no group crosses from one plane to the next.
            walk = coord.tp * self.pcp_size + coord.pcp
            return _Place(*divmod(plane * self.tp_size * self.pcp_size + walk, self.dcp_size))
        return _Place(*divmod(rank, self.slice_size))
