"""Bytes and calls of each exchange, per rank and layer: the one place for these formulas.

Plain numbers in and out, so that a prediction needs no ranks; the tests compare them with what the
tracing communicator counted.

Legend: `N = P' * k` DCP ranks, `n` rows and `h` query-head lanes that a rank owns, `Dq`, `Do`
widths of query and partial, `e`, `eo` bytes of a query or KV element and of a partial element, `Ks`
stored kv heads, `W` stored row width.
Source: docs/exchanges.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cost:
    """What one rank pays in one layer."""

    calls: int
    received_bytes: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.calls + other.calls, self.received_bytes + other.received_bytes)


FREE = Cost(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeShape:
    """Sizes of one exchange on one rank."""

    num_replicas: int
    """`P'`: PCP ranks in the DCP group."""
    slice_size: int
    """`k`: TP ranks in the DCP group."""
    num_rows: int
    lanes: int
    query_width: int
    partial_width: int
    element_bytes: int
    partial_bytes: int = 4

    @property
    def world_size(self) -> int:
        """`N`."""
        return self.num_replicas * self.slice_size


def query_gather(shape: ExchangeShape, *, copied: bool) -> Cost:
    """Queries of distributed rows travel over the DCP group, those of COPY rows over the slice
    only.
    """
    others = (shape.slice_size if copied else shape.world_size) - 1
    if others == 0 or shape.num_rows == 0:
        return FREE
    own = shape.num_rows * shape.lanes * shape.query_width * shape.element_bytes
    return Cost(1, others * own)


def partials_return(exchange: str, shape: ExchangeShape, *, copied: bool) -> Cost:
    """The way back of partial outputs and their log-sum-exps.

    Args:
        exchange: `ag_rs`, `ag_ar`, `a2a`, or `local` for a group of one.
        shape: sizes.
        copied: COPY rows, which every PCP rank holds and wants back.
    Raises:
        ValueError: an exchange without a formula for a group of this size.
    """
    others = shape.world_size - 1
    if others == 0 or shape.num_rows == 0:
        return FREE
    own = shape.num_rows * shape.lanes
    held = own * shape.slice_size * (1 if copied else shape.num_replicas)
    if exchange == "a2a":
        return Cost(1, others * own * (shape.partial_width + 1) * shape.partial_bytes)
    lse_bytes = others * held * shape.partial_bytes
    out_bytes = shape.partial_width * shape.partial_bytes
    if exchange == "ag_rs":
        return Cost(2, lse_bytes + others * own * out_bytes)
    if exchange == "ag_ar":
        return Cost(2, lse_bytes + 2 * others * held * out_bytes // shape.world_size)
    raise ValueError(
        f"exchange {exchange!r} has no cost in a group of {shape.world_size}; "
        "those that have one are ag_rs, ag_ar and a2a"
    )


def context_gather(
    world_size: int, padded_local_rows: int, stored_heads: int, row_width: int, element_bytes: int
) -> Cost:
    """One chunk of cached context, gathered over the DCP group."""
    if world_size == 1:
        return FREE
    own = padded_local_rows * stored_heads * row_width * element_bytes
    return Cost(1, (world_size - 1) * own)


def new_kv_gather(
    pcp_size: int, num_rows: int, stored_heads: int, row_width: int, element_bytes: int
) -> Cost:
    """New KV of the distributed rows, gathered over PCP in one fused call."""
    if pcp_size == 1 or num_rows == 0:
        return FREE
    return Cost(1, (pcp_size - 1) * num_rows * stored_heads * row_width * element_bytes)
