"""From measured times to the constants of the model of cost.

    seconds = alpha + received bytes / beta

Bytes are those that the planner counts for the same call (`heddle.step.traffic`), so the constants
fit the formula in which they are used. Relative errors are minimised: microseconds of small calls
weigh as much as milliseconds of large ones. With x = bytes / seconds and y = 1 / seconds the model
reads `1 = alpha * y + x / beta`, a line through least squares.

Source: our derivation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from heddle.config.link_costs import LinkCosts
from heddle.layout.mesh import Mesh
from heddle.step.traffic import Collective, cost_of

_ITEM_BYTES = 4


def fit_costs(
    collectives: Sequence[Mapping[str, Any]], *, flops: float, memory: float
) -> LinkCosts:
    """The constants of a machine.

    Args:
        collectives: op, ranks, bytes that a rank puts in, and seconds; of at least two sizes.
        flops: operations a second of one rank.
        memory: bytes a second read by one rank.
    """
    points = [(received_bytes(row), float(row["seconds"])) for row in collectives]
    alpha, slope = _line(points)
    return LinkCosts(alpha=alpha, beta=1 / slope, flops=flops, memory=memory)


def received_bytes(row: Mapping[str, Any]) -> int:
    """Bytes that a rank receives in a call, as the planner counts them.

    Example:
        >>> received_bytes({"op": "all_gather", "ranks": 3, "bytes": 4096})
        8192
    """
    call = Collective(row["op"], "tp", (row["bytes"] // _ITEM_BYTES,), "float32")
    return cost_of([call], Mesh(tp_size=row["ranks"])).received_bytes


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(seconds of an empty call, seconds of a byte), both above 0."""
    xs = [size / seconds for size, seconds in points]
    ys = [1 / seconds for _, seconds in points]
    xx, xy, yy = _dot(xs, xs), _dot(xs, ys), _dot(ys, ys)
    det = xx * yy - xy * xy
    alpha = (xx * sum(ys) - xy * sum(xs)) / det
    slope = (yy * sum(xs) - xy * sum(ys)) / det
    # Noise may turn one of them negative where the other explains everything.
    fastest = min(seconds for _, seconds in points)
    cheapest = min(seconds / size for size, seconds in points)
    return (alpha if alpha > 0 else fastest), (slope if slope > 0 else cheapest)


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
