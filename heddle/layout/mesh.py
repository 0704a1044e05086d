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

Two kinds leave the plane. PP joins the stages at one place of their planes, in stage order; EP
joins the planes of all DP replicas of one stage, DP slowest, because every rank of a stage holds
experts for all its replicas. External DP replicas are separate engines and share no group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from heddle.config.parallel import ParallelConfig
from heddle.errors import TopologyError

GroupKind = Literal["tp", "pcp", "dcp", "slice", "pp", "ep"]
PLANE_KINDS: tuple[GroupKind, ...] = ("tp", "pcp", "dcp", "slice")
"""Kinds whose groups never leave one TP x PCP plane."""
GROUP_KINDS: tuple[GroupKind, ...] = (*PLANE_KINDS, "pp", "ep")

_WALKS: dict[GroupKind, tuple[int, ...]] = {
    # Axes (external_dp 0, dp 1, pp 2, pcp 3, tp 4) in walking order, fastest last.
    "tp": (0, 1, 2, 3, 4),
    "pcp": (0, 1, 2, 4, 3),
    "dcp": (0, 1, 2, 4, 3),
    "slice": (0, 1, 2, 3, 4),
    "pp": (0, 1, 3, 4, 2),
    "ep": (0, 2, 1, 3, 4),
}
"""Groups of a kind are consecutive runs of its walk over the world."""


def divisors(size: int) -> tuple[int, ...]:
    """All divisors of a positive size, ascending."""
    low = [part for part in range(1, math.isqrt(size) + 1) if size % part == 0]
    return tuple(sorted({*low, *(size // part for part in low)}))


def is_legal_dcp(tp_size: int, pcp_size: int, dcp_size: int) -> bool:
    """True when DCP divides PCP, or is PCP times a divisor of TP: groups are then rectangles."""
    if pcp_size % dcp_size == 0:
        return True
    return dcp_size % pcp_size == 0 and tp_size % (dcp_size // pcp_size) == 0


def legal_dcp_sizes(tp_size: int, pcp_size: int) -> tuple[int, ...]:
    """All legal DCP sizes, ascending.

    Example:
        >>> legal_dcp_sizes(tp_size=4, pcp_size=3)
        (1, 3, 6, 12)
    """
    sizes = divisors(tp_size * pcp_size)
    return tuple(size for size in sizes if is_legal_dcp(tp_size, pcp_size, size))


@dataclass(frozen=True, slots=True)
class Coord:
    """Place of a rank on every axis, slowest first."""

    external_dp: int
    dp: int
    pp: int
    pcp: int
    tp: int


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
        if not is_legal_dcp(self.tp_size, self.pcp_size, self.dcp_size):
            legal = legal_dcp_sizes(self.tp_size, self.pcp_size)
            raise TopologyError(
                [
                    f"dcp_size={self.dcp_size} is not legal with tp_size={self.tp_size}, "
                    f"pcp_size={self.pcp_size}; legal here: {', '.join(map(str, legal))}"
                ]
            )

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Mesh:
        """The ranks of a layout's degrees."""
        return cls(
            tp_size=parallel.tensor_parallel_size,
            pcp_size=parallel.prefill_context_parallel_size,
            dcp_size=parallel.decode_context_parallel_size,
            pp_size=parallel.pipeline_parallel_size,
            dp_size=parallel.data_parallel_size,
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
        self._check_rank(rank)
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
            >>> mesh = Mesh(tp_size=2, pp_size=2, dp_size=2)
            >>> mesh.groups("pp")
            ((0, 2), (1, 3), (4, 6), (5, 7))
            >>> mesh.groups("ep")
            ((0, 1, 4, 5), (2, 3, 6, 7))
        """
        axes = (self.external_dp_size, self.dp_size, self.pp_size, self.pcp_size, self.tp_size)
        walk = np.arange(self.world_size).reshape(axes).transpose(_WALKS[kind])
        return tuple(map(tuple, walk.reshape(-1, self.group_size(kind)).tolist()))

    def group_size(self, kind: GroupKind) -> int:
        """Members of each group of a kind.

        Example:
            >>> Mesh(tp_size=4, pcp_size=2, pp_size=3, dp_size=5).group_size("ep")
            40
        """
        sizes: dict[GroupKind, int] = {
            "tp": self.tp_size,
            "pcp": self.pcp_size,
            "dcp": self.dcp_size,
            "slice": self.slice_size,
            "pp": self.pp_size,
            "ep": self.dp_size * self.pcp_size * self.tp_size,
        }
        return sizes[kind]

    def group_of(self, kind: GroupKind, rank: int) -> tuple[int, ...]:
        """The group of a kind that holds a global rank, in its order."""
        self._check_rank(rank)
        return next(group for group in self.groups(kind) if rank in group)

    def position(self, kind: GroupKind, rank: int) -> int:
        """Place of a global rank in its group's ordered list.

        In a DCP group, `position % num_replicas` is the block of rows that the rank owns and
        `position // num_replicas` the block of heads.
        """
        return self.group_of(kind, rank).index(rank)

    def replica_of(self, rank: int) -> int:
        """DP coordinate of a global rank: the replica whose requests it serves.

        Raises:
            ValueError: the rank is outside the world.
        """
        return self.coord_of(rank).dp

    def ranks_of_replica(self, dp: int) -> tuple[int, ...]:
        """All global ranks with a DP coordinate, ascending.

        Raises:
            ValueError: there is no such replica.
        Example:
            >>> Mesh(tp_size=2, pp_size=2, dp_size=2).ranks_of_replica(1)
            (4, 5, 6, 7)
        """
        if not 0 <= dp < self.dp_size:
            raise ValueError(f"dp={dp}; must be in [0, {self.dp_size})")
        return tuple(rank for rank in range(self.world_size) if self.replica_of(rank) == dp)

    def is_last_stage(self, rank: int) -> bool:
        """True when a global rank holds the last layers, whose hidden rows become logits.

        Raises:
            ValueError: the rank is outside the world.
        """
        return self.coord_of(rank).pp == self.pp_size - 1

    def _plane_of(self, coord: Coord) -> int:
        """Index of the TP x PCP plane that holds a coordinate."""
        return (coord.external_dp * self.dp_size + coord.dp) * self.pp_size + coord.pp

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank}; must be in [0, {self.world_size})")
