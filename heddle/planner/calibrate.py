"""A sheet of this machine, from what `heddle doctor` measured.

Ranks were timed side by side, each on its share of the cores, as they work in an engine; a core
gets its part of a rank's rates. What the measurement does not touch (efficiencies, overheads of
steps, links between hosts) keeps the ranges of the sheet for processors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from heddle.planner.devices import Figure, Link, Sheet, load_sheet

_RANGE = 1.15
"""Between two measurements of a machine that others use as well."""
_LINKS = ("shm", "gloo")
"""What connects ranks of one host, the faster first."""


def sheet_of(document: Mapping[str, Any]) -> Sheet:
    """The sheet.

    Args:
        document: of a checkup: `machine`, `costs` by link, and `collectives`, whose rows say how
            many ranks were timed.
    Raises:
        KeyError: the checkup measured no link.
    """
    base = load_sheet("CPU")
    machine = document["machine"]
    link = next((name for name in _LINKS if name in document["costs"]), None)
    if link is None:
        raise KeyError("no link between ranks was measured")
    costs = document["costs"][link]
    num_ranks = max(row["ranks"] for row in document["collectives"])
    cores = max(int(machine["cores"]), 1)
    per_rank = max(cores // num_ranks, 1)
    source = f"measured by {num_ranks} ranks side by side over {link}"

    def figure(value: float) -> Figure:
        return Figure(value=value, low=value / _RANGE, high=value * _RANGE, source=source)

    return msgspec.structs.replace(
        base,
        name=str(machine["processor"]),
        devices_per_host=cores,
        memory_bytes=Figure(
            value=machine["memory_bytes"] / cores, source="a core's share of the memory of the host"
        ),
        memory_bandwidth=figure(costs["memory"] / per_rank),
        flops={"float32": figure(costs["flops"] / per_rank)},
        inside=Link(alpha=figure(costs["alpha"]), beta=figure(costs["beta"])),
        is_measured=True,
    )
