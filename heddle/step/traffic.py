"""One collective call as a value, and what it costs a rank.

Everything that a step sends is first described by such values (`exchanges`, `schedule`); a rank's
calls are held against them, and prices are read off them. There is no second formula to keep true.

Legend: `N` ranks of the group.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

from heddle.config.link_costs import LinkCosts
from heddle.layout.cache_rows import DTYPE_BYTES
from heddle.layout.mesh import GroupKind, Mesh

_ITEM_BYTES = {**DTYPE_BYTES, "int64": 8, "int32": 4, "uint8": 1}

CollectiveOp = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift", "send", "receive"
]
"""Calls of the protocol, `heddle.comm.base`."""


class Collective(NamedTuple):
    """One call: what is handed in, by shape and dtype."""

    op: str
    group: GroupKind
    shape: tuple[int | None, ...]
    """None: a size that the data decide, equal on all ranks of the group."""
    dtype: str


@dataclass(frozen=True, slots=True)
class Cost:
    """What one rank pays."""

    calls: int
    received_bytes: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.calls + other.calls, self.received_bytes + other.received_bytes)

    def seconds(self, costs: LinkCosts) -> float:
        """`calls * alpha + bytes / beta`."""
        return self.calls * costs.alpha + self.received_bytes / costs.beta


FREE = Cost(0, 0)


def cost_of(collectives: Iterable[Collective], mesh: Mesh) -> Cost:
    """Calls and bytes that a rank receives.

    Raises:
        ValueError: a size that only the data know.
    Example:
        >>> mesh = Mesh(tp_size=2, dcp_size=2)
        >>> cost_of([Collective("all_gather", "dcp", (3, 4), "float32")], mesh)
        Cost(calls=1, received_bytes=48)
    """
    num_calls = num_bytes = one = 0
    last: Collective | None = None
    for call in collectives:
        if call is not last:  # a ring makes the same call for each hop
            last, one = call, _received_by_call(call, mesh)
        num_calls += 1
        num_bytes += one
    return Cost(num_calls, num_bytes)


def _received_by_call(call: Collective, mesh: Mesh) -> int:
    sizes = [size for size in call.shape if size is not None]
    if len(sizes) < len(call.shape):
        raise ValueError(f"{call} has a size that only the data know; it has no fixed cost")
    own = prod(sizes) * _ITEM_BYTES[call.dtype]
    return received_bytes(call.op, own, mesh.group_size(call.group))


def received_bytes(op: str, own: int, ranks: int) -> int:
    """Bytes that a rank receives in one call, whole ones.

    All-gather: `(N - 1)` times its own; reduce-scatter and all-to-all: `(N - 1) / N` of the input;
    all-reduce: twice that; a shift or a receive: its own size; a send: nothing.

    Args:
        op: a `CollectiveOp`.
        own: bytes that it hands in; of a receive, those that are announced.
        ranks: of the group.
    Source: the textbook algorithms (rings), which no implementation sends less than.
    Example:
        >>> received_bytes("all_reduce", 32, 4)
        48
    """
    if op == "all_gather":
        return (ranks - 1) * own
    if op in ("reduce_scatter", "all_to_all"):
        return (ranks - 1) * own // ranks
    if op == "all_reduce":
        return 2 * (ranks - 1) * own // ranks
    return {"shift": own, "receive": own, "send": 0}[op]
