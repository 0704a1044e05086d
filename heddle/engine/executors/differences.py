"""What the driver's reading of a step and a rank's have apart, as a table for people."""

from __future__ import annotations

from collections.abc import Mapping

from heddle.config.engine import ResolvedConfig
from heddle.step.batch import GlobalBatch
from heddle.step.plan import plan
from heddle.step.sketch import side_by_side, sketch_plan
from heddle.step.topology import Topology


def compare_sketch(
    resolved: ResolvedConfig, batch: GlobalBatch, rank: int, sketch: Mapping[str, str]
) -> str:
    """Only what differs; the driver's plan is derived once more, for an error has time.

    Args:
        resolved: what runs.
        batch: as the driver sent it.
        rank: that understood something else.
        sketch: what it understood, see `sketch_plan`.
    """
    topology = Topology.from_resolved(resolved)
    return side_by_side(sketch_plan(plan(batch, topology), topology, rank), sketch, f"rank {rank}")
