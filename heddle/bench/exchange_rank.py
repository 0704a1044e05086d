"""The worker of a rank that times collectives instead of running a model.

An engine's executor starts it, so that it meets the communicators that an engine on this layout
would have. The number of a step says what is timed; its reply carries the seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch

from heddle.comm.base import Communicator, World
from heddle.config.engine import ResolvedConfig
from heddle.faults.watch import RankWatch
from heddle.layout.mesh import GroupKind, Mesh
from heddle.step.batch import GlobalBatch, RankReply

WORKER = "heddle.bench.exchange_rank:ExchangeWorker"
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22)
"""Bytes that each rank puts in."""
REPEATS = 20


class ExchangeCase(NamedTuple):
    """One thing to time."""

    kind: GroupKind
    op: str
    num_bytes: int


def mesh_of(resolved: ResolvedConfig) -> Mesh:
    """The mesh of a layout."""
    return Mesh.of(resolved.parallel)


KINDS: tuple[GroupKind, ...] = ("tp", "pcp", "dcp")


def exchange_cases(resolved: ResolvedConfig) -> list[ExchangeCase]:
    """Every operation and size, for every kind of group with more than one rank."""
    mesh = mesh_of(resolved)
    kinds = [kind for kind in KINDS if len(mesh.groups(kind)[0]) > 1]
    return [
        ExchangeCase(kind, op, num_bytes)
        for kind in kinds
        for op in OPERATIONS
        for num_bytes in SIZES
    ]


class ExchangeWorker:
    """A `Worker`."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        global_rank: int,
        world: World,
        on_progress: Callable[[int, int], None] | None = None,
        *,
        watch: RankWatch | None = None,
    ) -> None:
        """Form the groups of the layout.

        Args:
            resolved: the layout.
            global_rank: which rank this is.
            world: its way to the others.
            on_progress: nothing is loaded.
            watch: nothing is told.
        """
        del global_rank, on_progress, watch
        mesh = mesh_of(resolved)
        self._cases = exchange_cases(resolved)
        self._groups = {kind: world.group(kind, mesh.groups(kind)) for kind in KINDS}

    def execute(self, batch: GlobalBatch, digest: int, deadline: float | None) -> RankReply:
        """Time the case with the number of the step."""
        case = self._cases[batch.step]
        group = self._groups[case.kind]
        group.set_deadline(deadline)
        return RankReply(
            epoch=batch.epoch,
            step=batch.step,
            digest=digest,
            coverage=(),
            seconds=_seconds(group, case),
        )


def _seconds(group: Communicator, case: ExchangeCase) -> float:
    """Median of several calls, once the first is through."""
    # Leading axis N: what reduce-scatter and all-to-all ask for, and no harm to the others.
    tensor = torch.ones(group.world_size, case.num_bytes // 4 // group.world_size)
    call = getattr(group, case.op)
    call(tensor)
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        call(tensor)
        seconds.append(time.perf_counter() - started)
    return median(seconds)
