"""What a rank would hold, to the byte, before anything is loaded.

The rank is built as it would run, on torch's `meta` device: tensors have shapes and no memory, and
slices of the checkpoint are answered from its headers. So nothing of that is estimated, and a
checkpoint that lacks a tensor, or has one of another shape, is refused here as it would be later.
What a step takes on top follows from its rows and their widths (`step_memory`); interpreter and
libraries are measured, in this process.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from types import FunctionType, ModuleType

import psutil
import torch

from heddle.attention.backends import create_backend
from heddle.comm.threads import ThreadGroup
from heddle.config.engine import ResolvedConfig
from heddle.kernels.registry import create_kernels
from heddle.models.weights.memory import META, HeaderSource
from heddle.models.weights.source import WeightSource
from heddle.runner.step_memory import StepMemory
from heddle.runner.worker import RankWorker
from heddle.step.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """Memory of one rank. Pools are reserved, and committed as they are written."""

    weights: int
    """Parameters, and tables that are made from the configuration."""
    cache: int
    """The KV pool."""
    states: int
    """The pool of recurrent states."""
    exchange: int
    """Shared memory that it maps, its peers' boxes included."""
    own_exchange: int
    """The part of that which is its own; over ranks these add up to what the host spends."""
    activations: int
    """Of the largest step."""

    @property
    def total(self) -> int:
        """Resident size of the rank without interpreter and libraries."""
        return self.weights + self.cache + self.states + self.exchange + self.activations


def process_bytes(resolved: ResolvedConfig) -> int:
    """Resident size of this process once it has what a rank runs: interpreter, torch, kernels.

    To be asked before anything of a model is made. Pages of libraries count as far as this process
    has touched them; a rank that is forked from a warm launcher maps some of them later, or never.
    """
    create_kernels(resolved.kernels, resolved.num_threads)
    create_backend(resolved.backend, resolved.num_threads)
    return int(psutil.Process().memory_info().rss)


def weigh_rank(resolved: ResolvedConfig, global_rank: int, source: WeightSource) -> RankBytes:
    """Build one rank without memory, and count.

    Args:
        resolved: what would run.
        global_rank: which rank.
        source: the checkpoint; no content is read.
    Raises:
        ModelFileError: a tensor is missing, surplus or of another shape.
        UnsupportedError: the model or the backend cannot be run.
    """
    world = ThreadGroup(resolved.parallel.world_size).world(global_rank)
    worker = RankWorker(resolved, global_rank, world, source=HeaderSource(source), device=META)
    step = StepMemory(resolved, worker.topology, global_rank)
    exchange, own_exchange = step.exchange_bytes
    return RankBytes(
        weights=held_bytes(worker.model),
        cache=held_bytes(worker.store),
        states=held_bytes(worker.states),
        exchange=exchange,
        own_exchange=own_exchange,
        activations=step.activation_bytes,
    )


def distinct_ranks(resolved: ResolvedConfig) -> dict[int, list[int]]:
    """Ranks that hold the same parts: the first of them, and all of them.

    Parameters depend on the stage, the place in the TP group and the experts that are dealt out;
    pools on the stage and the place in the TP group.
    """
    topology = Topology.from_resolved(resolved)
    mesh = topology.mesh
    found: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(resolved.parallel.world_size):
        coord = mesh.coord_of(rank)
        experts = next(group.index(rank) for group in mesh.groups("ep") if rank in group)
        dealt = experts if topology.has_expert_parallel else 0
        found.setdefault((coord.pp, coord.tp, dealt), []).append(rank)
    return {ranks[0]: ranks for ranks in found.values()}


def held_bytes(root: object) -> int:
    """Bytes of all tensors that can be reached from an object, each storage once."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    stack = [root]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
        else:
            stack.extend(_parts(item))
    return sum(storages.values())


def _parts(item: object) -> list[object]:
    """What an object refers to; neither classes and modules, nor what a function reads from its
    module.
    """
    if isinstance(item, type | ModuleType):
        return []
    if isinstance(item, FunctionType):
        return list(item.__closure__ or ())
    return gc.get_referents(item)
