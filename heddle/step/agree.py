"""Whether the KV writes of a step add up, before any token of it is released."""

from __future__ import annotations

from collections.abc import Sequence

from heddle.errors import PlanMismatch
from heddle.step.batch import GlobalBatch, RankReply
from heddle.step.topology import Topology


def check_coverage(
    replies: Sequence[RankReply],
    batch: GlobalBatch,
    coverage: Sequence[int],
    topology: Topology,
    first_rank: int = 0,
) -> None:
    """Each store copy wrote every new position of the step once, in its own slot.

    Args:
        replies: of one replica, in global rank order.
        batch: of the step.
        coverage: what the layout says, per cache group; see `expected_coverage`.
        topology: of the engine.
        first_rank: global rank of the replica's first rank.
    Raises:
        PlanMismatch: naming the first ranks whose sum differs.
    """
    for group, expected in enumerate(coverage):
        for members in _store_copies(topology, group):
            total = sum(replies[place].coverage[group] for place in members) % 2**64
            if total != expected:
                ranks = [first_rank + place for place in members]
                raise PlanMismatch(
                    f"step {batch.step}: ranks {ranks} wrote KV of cache group {group} that "
                    f"sums to {total:#018x}, the layout says {expected:#018x}; "
                    "nothing of this step is released"
                )


def _store_copies(topology: Topology, group: int) -> list[tuple[int, ...]]:
    """Places, within a replica, of the ranks that together store each position once."""
    mesh = topology.mesh
    size = mesh.world_size // mesh.dp_size
    if topology.groups[group].world_size == 1:
        return [(place,) for place in range(size)]
    return [members for members in topology.dcp_groups if max(members) < size]
