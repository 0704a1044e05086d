"""Follow rows and keys of a step by hand: placement formulas written out once more."""

from __future__ import annotations

from heddle.step.batch import GlobalBatch
from heddle.step.local_group import GroupStep, localize_group
from heddle.step.localize import RankStep, localize
from heddle.step.plan import plan
from heddle.step.topology import Topology


def owner_and_slot(topology: Topology, table: tuple[int, ...], position: int) -> tuple[int, int]:
    """DCP position that stores a token, and its slot there, counted the long way."""
    ranks, run, block = topology.groups[0].world_size, topology.interleave_size, topology.block_size
    owner, local = 0, [0] * ranks
    for t in range(position + 1):
        owner = (t // run) % ranks
        if t < position:
            local[owner] += 1
    index = local[owner]
    return owner, table[index // block] * block + index % block


def groups_of(topology: Topology, batch: GlobalBatch) -> list[GroupStep]:
    """The only cache group, on every rank."""
    return [localize_group(step, topology, 0) for step in steps_of(topology, batch)]


def store_copies(topology: Topology) -> list[tuple[int, ...]]:
    """Ranks that together store each position once."""
    if topology.groups[0].world_size == 1:
        return [(rank,) for rank in range(topology.mesh.world_size)]
    return list(topology.mesh.groups("dcp"))


def steps_of(topology: Topology, batch: GlobalBatch) -> list[RankStep]:
    step_plan = plan(batch, topology)
    return [localize(step_plan, topology, rank) for rank in range(topology.mesh.world_size)]


def received_tags(
    topology: Topology, steps: list[RankStep], groups: list[GroupStep], rank: int
) -> list[tuple[int, int] | None]:
    """Follow (request, position) of each distributed row over the wire to one rank."""
    ids = [request.request_id for request in steps[0].plan.batch.requests]
    rows = steps[0].plan.rows

    def own(pcp_rank: int) -> list[tuple[int, int] | None]:
        start = pcp_rank * rows.num_local_rows
        return [
            (
                ids[steps[0].rows.request[rows.gather[j]]],
                int(steps[0].rows.position[rows.gather[j]]),
            )
            if rows.valid[j]
            else None
            for j in range(start + rows.num_copy, start + rows.num_local_rows)
        ]

    (peers,) = [group for group in topology.mesh.groups("pcp") if rank in group]
    me = peers.index(rank)
    if groups[rank].plan.new_rows != "halo":
        return [tag for other in range(len(peers)) for tag in own(other)]
    found: list[tuple[int, int] | None] = []
    for other, peer in enumerate(peers):
        sends = groups[peer].new_sends
        assert sends is not None
        assert sends.shape == (len(peers), groups[peer].plan.halo_rows)
        mine = own(other)
        found += [mine[j] for j in sends[me]]
    return found + own(me)
