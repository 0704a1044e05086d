"""Constants of a machine that choices weigh against each other; frozen at start-up.

A collective of `bytes` received costs `alpha + bytes / beta` seconds; attention costs its flops
over `flops`, dense layers the larger of flops and the reading of their weights.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCosts:
    """One set of constants for all groups of an engine."""

    alpha: float = 1.5e-4
    """Seconds of an empty collective call."""
    beta: float = 1.5e9
    """Bytes received a second."""
    flops: float = 5e10
    """Multiply and add operations a second of one rank, in matrix products."""
    memory: float = 1e10
    """Bytes read a second by one rank."""
    request: float = 2e-4
    """Seconds in one layer for a request whose rows are no copies: it is attended to by itself."""


SHARED_MEMORY_COSTS = LinkCosts(alpha=1.5e-5, beta=2.5e9)
"""Defaults where ranks share memory; those of the class are of gloo's sockets on one host."""
