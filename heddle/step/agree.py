"""Whether the KV writes of a step add up, before any token of it is released."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from heddle.errors import PlanMismatch
from heddle.layout.mesh import GROUP_KINDS, GroupKind, Mesh
from heddle.step.batch import GlobalBatch, RankReply
from heddle.step.coverage import describe_stray, mix
from heddle.step.localize import localize
from heddle.step.plan import plan
from heddle.step.slots import row_slots
from heddle.step.topology import Topology
from heddle.units import PAD_SLOT_ID

_COMPARED_GROUPS = tuple(kind for kind in GROUP_KINDS if kind != "pp")


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
        PlanMismatch: naming the first ranks whose sum differs, and the one of them that strayed.
    """
    for group, expected in enumerate(coverage):
        for members in _store_copies(topology, group):
            total = sum(replies[place].coverage[group] for place in members) % 2**64
            if total != expected:
                ranks = [first_rank + place for place in members]
                sums = [replies[place].coverage[group] for place in members]
                raise PlanMismatch(
                    f"step {batch.step}: ranks {ranks} wrote KV of cache group {group} that "
                    f"sums to {total:#018x}, the layout says {expected:#018x}"
                    f"{_who_strayed(batch, topology, group, ranks, sums)}; "
                    "nothing of this step is released",
                    kind="coverage",
                )


def check_calls(replies: Sequence[RankReply], topology: Topology, first_rank: int = 0) -> None:
    """Members of each group made the same collectives in the same order.

    Of a pipeline, one end sends what the other receives; its calls are held against the plan alone,
    by each rank.

    Args:
        replies: of one replica, in global rank order.
        topology: of the engine.
        first_rank: global rank of the replica's first rank.
    Raises:
        PlanMismatch: naming two ranks whose calls differ.
    """
    for kind in _COMPARED_GROUPS:
        for members in _groups_of_replica(topology, kind):
            hashes = [replies[place].call_hashes.get(kind, 0) for place in members]
            strays = [
                place for place, found in zip(members, hashes, strict=True) if found != hashes[0]
            ]
            if strays:
                raise PlanMismatch(
                    f"step {replies[0].step}: rank {first_rank + strays[0]} made other collectives "
                    f"in its {kind} group than rank {first_rank + members[0]} did; nothing of this "
                    "step is released",
                    kind="collective",
                )


@lru_cache(maxsize=64)
def _kind_groups(mesh: Mesh, kind: GroupKind) -> tuple[tuple[int, ...], ...]:
    """Members of each group within a replica, those of one left out."""
    size = mesh.world_size // mesh.dp_size
    groups = (tuple(rank for rank in group if rank < size) for group in mesh.groups(kind))
    return tuple(group for group in groups if len(group) > 1)


def _groups_of_replica(topology: Topology, kind: GroupKind) -> tuple[tuple[int, ...], ...]:
    if kind == "ep" and not topology.has_expert_parallel:
        return ()
    return _kind_groups(topology.mesh, kind)


def _who_strayed(
    batch: GlobalBatch, topology: Topology, group: int, ranks: Sequence[int], sums: Sequence[int]
) -> str:
    """Each rank whose own sum is not what the plan says of it, with the row where one explains it;
    empty where all of them did alike.
    """
    step_plan, found = plan(batch, topology), []
    ids = np.array([request.request_id for request in batch.requests], dtype=np.int64)
    for rank, total in zip(ranks, sums, strict=True):
        step = localize(step_plan, topology, rank)
        slots = row_slots(step, topology, group, topology.group_position(group, rank))
        own = slots != PAD_SLOT_ID
        due = (ids[step.rows.request[own]], step.rows.position[own], slots[own])
        if difference := (total - mix(*due)) % 2**64:
            row = describe_stray(difference, *due)
            found.append(f"rank {rank}, where {row}" if row else f"rank {rank}")
    return f"; it is {' and '.join(found)}" if found else ""


def _store_copies(topology: Topology, group: int) -> list[tuple[int, ...]]:
    """Places, within a replica, of the ranks that together store each position once."""
    mesh = topology.mesh
    size = mesh.world_size // mesh.dp_size
    if topology.groups[group].world_size == 1:
        return [(place,) for place in range(size)]
    return [members for members in topology.dcp_groups if max(members) < size]
