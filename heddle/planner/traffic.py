"""What a planned step sends: the ranks' own list of calls, counted and priced link by link.

Calls and bytes are read off `collective_schedule`, which every rank holds its calls against, so
they equal what a tracing communicator counts. One thing the list cannot know: how many rows the
router sends to a rank that holds whole experts. There the mean is taken, times a factor.

Legend: `N` ranks of a group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby

from heddle.layout.mesh import GroupKind, Mesh
from heddle.planner.devices import Rates
from heddle.step.plan import StepPlan
from heddle.step.schedule import collective_schedule
from heddle.step.topology import Topology
from heddle.step.traffic import Collective, cost_of

EXPERT_SKEW = 1.5
"""Rows of the busiest pair of ranks over the mean, for exchanges padded to it: an assumption."""


@dataclass(slots=True)
class GroupTraffic:
    """What one rank says in the groups of one kind."""

    calls: int = 0
    received_bytes: int = 0
    shifted_bytes: int = 0
    """The part of these that arrives while a rank computes."""


@dataclass(slots=True)
class Traffic:
    """What one rank says in one step, by kind of group."""

    groups: dict[GroupKind, GroupTraffic] = field(default_factory=dict)

    def seconds(self, rates: Rates, topology: Topology, global_rank: int) -> tuple[float, float]:
        """Time of all calls, and the part of it during which a rank may compute.

        Args:
            rates: of the device.
            topology: of the engine.
            global_rank: whose groups are asked for; groups of one kind may cross hosts or not.
        """
        total = hidden = 0.0
        for kind, group in self.groups.items():
            link = rates.link(members_of(topology.mesh, kind, global_rank))
            total += group.calls * link.alpha + group.received_bytes / link.beta
            hidden += group.shifted_bytes / link.beta
        return total, hidden


def step_traffic(plan: StepPlan, topology: Topology, global_rank: int) -> Traffic:
    """Count the calls of one rank in one step.

    Args:
        plan: of the step.
        topology: constants of the engine.
        global_rank: rank in the world.
    """
    schedule = collective_schedule(plan, topology, global_rank)
    traffic, visits = Traffic(), _expert_rows(plan, topology)
    for calls in (schedule.prologue, schedule.epilogue):
        _add(traffic, calls, 1, topology, visits)
    # Layers of one kind say the same, so one of them is counted for all.
    kinds = [layer_kind(topology, layer) for layer in topology.stage_layers(global_rank)]
    first = dict(zip(reversed(kinds), reversed(schedule.layers), strict=True))
    for kind, times in Counter(kinds).items():
        _add(traffic, first[kind], times, topology, visits)
    return traffic


def _add(
    traffic: Traffic,
    calls: Iterable[Collective],
    times: int,
    topology: Topology,
    expert_rows: int,
) -> None:
    """Add calls that are made so many times; `expert_rows` stand for a size that the data know."""
    # A long context is gathered in many chunks of one size, which follow each other.
    for call, alike in groupby(calls):
        count = times * sum(1 for _ in alike)
        size = cost_of([_sized(call, expert_rows)], topology.mesh).received_bytes
        group = traffic.groups.setdefault(call.group, GroupTraffic())
        group.calls += count
        group.received_bytes += count * size
        group.shifted_bytes += count * size if call.op == "shift" else 0


def layer_kind(topology: Topology, layer: int) -> tuple[int, bool]:
    """What the calls of a layer depend on: its cache group (-1: recurrent), and experts."""
    moe = topology.model.moe
    return topology.group_of_layer.get(layer, -1), moe is not None and moe.has_experts(layer)


@lru_cache(maxsize=4096)
def members_of(mesh: Mesh, kind: GroupKind, global_rank: int) -> tuple[int, ...]:
    """Global ranks of a rank's group of a kind."""
    return next(group for group in mesh.groups(kind) if global_rank in group)


def _sized(call: Collective, expert_rows: int) -> Collective:
    if None not in call.shape:
        return call
    sizes = tuple(expert_rows if size is None else size for size in call.shape)
    return call._replace(shape=sizes)


def _expert_rows(plan: StepPlan, topology: Topology) -> int:
    """Rows that the busiest pair of ranks exchanges, of all rows of the step and their visits."""
    moe, ranks = topology.model.moe, topology.mesh.group_size("ep")
    if moe is None or not topology.has_expert_parallel:
        return 0
    num_rows = plan.rows.num_rows * topology.mesh.dp_size
    # A row goes once to each rank that holds some of its experts.
    targets = ranks * (1 - (1 - 1 / ranks) ** moe.num_experts_per_token)
    return -(-int(EXPERT_SKEW * num_rows * targets) // ranks**2)
