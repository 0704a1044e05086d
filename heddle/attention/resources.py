"""What attention on one rank works with; constant while the engine runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch

from heddle.attention.backends.base import AttentionBackend
from heddle.attention.exchange import create_exchange
from heddle.attention.exchange.base import Exchange
from heddle.attention.exchange.placement import Placement
from heddle.attention.recurrent.store import StateStore
from heddle.attention.storage import KVStore
from heddle.comm.base import Communicator, RankGroups
from heddle.comm.rank_clock import RankClock
from heddle.kernels.recording.player import Player
from heddle.kernels.registry import Kernels, create_kernels
from heddle.layout.heads import HeadRun
from heddle.step.localize import RankStep
from heddle.step.topology import Topology


@dataclass(frozen=True)
class AttentionResources:
    """Cache, groups and backend of one rank, with the head maps of its place in the mesh.

    The maps are made once: every layer of every step asks for them.
    """

    topology: Topology
    store: KVStore
    groups: RankGroups
    backend: AttentionBackend
    tp_rank: int
    states: StateStore | None = None
    """Of the recurrent layers that this rank holds; None: it has none."""
    kernels: Kernels = field(default_factory=partial(create_kernels, "torch"))
    recordings: Player | None = None
    """Of passes over this rank's layers; None: each pass is computed anew."""
    clock: RankClock | None = None
    """Told where a step is; None: nobody wants to know."""

    @cached_property
    def own_runs(self) -> Sequence[HeadRun]:
        """Lanes of this rank -> stored kv heads."""
        return self.topology.heads.runs(self.tp_rank)

    @cached_property
    def gathered_runs(self) -> Sequence[HeadRun]:
        """Lanes after a gather over the slice -> stored kv heads."""
        if self.topology.mesh.slice_size == 1:
            return self.own_runs
        return self.topology.heads.slice_runs(self.topology.mesh.slice_of(self.tp_rank))

    @property
    def partial_dtype(self) -> torch.dtype:
        """Partials are float32, or wider where the model computes wider."""
        return torch.float64 if self.topology.dtype == "float64" else torch.float32

    def placement(self, step: RankStep, num_rows: int, *, is_copy: bool) -> Placement:
        """Where gathered rows and heads lie in this rank's DCP group."""
        return Placement(
            num_replicas=self.topology.mesh.num_replicas,
            slice_size=self.topology.mesh.slice_size,
            num_rows=num_rows,
            lanes=self.topology.heads.lanes,
            is_copy=is_copy,
            position=step.dcp_rank,
            used_lanes=self._used_lanes,
            has_slice_queries=self.topology.replicates_queries,
        )

    def local_placement(self, num_rows: int) -> Placement:
        """The same where every rank has all its keys: only its own rows and heads."""
        return Placement(
            num_replicas=1,
            slice_size=1,
            num_rows=num_rows,
            lanes=self.topology.heads.lanes,
            is_copy=True,
            position=0,
            used_lanes=tuple(self._used_lanes[self.slice_lanes]),
        )

    @cached_property
    def slice_lanes(self) -> slice:
        """This rank's own lanes among those of its slice."""
        lanes = self.topology.heads.lanes
        first = self.tp_rank % self.topology.mesh.slice_size * lanes
        return slice(first, first + lanes)

    @property
    def own_lanes(self) -> slice:
        """This rank's own lanes among the queries that it projects."""
        if self.topology.replicates_queries:
            return self.slice_lanes
        return slice(0, self.topology.heads.lanes)

    def runs_at(self, place: int) -> Sequence[HeadRun]:
        """Lanes of the rank at a place of the DCP group -> kv heads stored by its slice."""
        mesh = self.topology.mesh
        first = self.tp_rank // mesh.slice_size * mesh.slice_size
        return self.topology.heads.runs(first + place // mesh.num_replicas)

    @property
    def replicas(self) -> Communicator:
        """The PCP ranks of this rank's DCP group, once each."""
        mesh = self.topology.mesh
        return self.groups.pcp if mesh.num_replicas == mesh.pcp_size else self.groups.dcp

    @cached_property
    def _used_lanes(self) -> tuple[bool, ...]:
        """Which gathered lanes hold a query head; pad lanes of uneven cuts do not."""
        used = {lane for run in self.gathered_runs for lane in range(run.start, run.end)}
        num_lanes = self.topology.mesh.slice_size * self.topology.heads.lanes
        return tuple(lane in used for lane in range(num_lanes))

    def exchange(self, name: str) -> Exchange | None:
        """The exchange of a plan's choice; None where nothing travels."""
        if name in ("none", "local") or self.groups.dcp.world_size == 1:
            return None
        keeps_lse = self.topology.model.has_sinks
        return create_exchange(name, self.replicas, keeps_lse=keeps_lse, kernels=self.kernels)
