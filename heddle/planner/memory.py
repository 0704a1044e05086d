"""What a rank of a layout would hold on a device, and what room that leaves for tokens.

    memory of a rank = reserve + weights + activations + exchange + pool (KV, and recurrent states)

The pool gets what the others leave, unless its size was given; all else follows from settings as an
engine resolves them. The rank that holds most decides.

Legend: `V` virtual block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from heddle.config import EngineConfig, ParallelConfig
from heddle.config.engine import ResolvedConfig
from heddle.config.link_costs import LinkCosts
from heddle.kvcache.manager import DEFAULT_STATE_UNIT
from heddle.kvcache.pins import num_pinned_blocks
from heddle.layout.cache_groups import CacheGroup, max_stage_tensors
from heddle.layout.cache_need import blocks_needed, longest_sequence
from heddle.layout.cache_rows import row_format
from heddle.layout.pool import state_slot_bytes
from heddle.layout.resolve import resolve
from heddle.planner.parts import RankWeights
from heddle.planner.settings import DoesNotFit, Settings
from heddle.planner.shares import distinct_shares
from heddle.planner.weights import rank_weights
from heddle.runner.step_memory import StepMemory
from heddle.step.topology import Topology

_GRAIN = 1 << 20
"""Pools are given in whole MiB, so that a flag can be read."""
_AMPLE_BLOCKS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySheet:
    """The rank that holds most, in bytes, and the layout's room, in tokens."""

    device: int
    """What a rank has."""
    reserve: int
    weights: int
    replicated_weights: int
    """The part of these that every tensor-parallel rank holds alike."""
    activations: int
    exchange: int
    """Its own part of the memory that ranks of a host share."""
    kv_pool: int
    states: int
    mapped_exchange: int
    """With the parts of its peers: they count as its own where a process is looked at."""
    token: int
    """KV of one position on this rank, all layers of its stage together."""
    kv_copies: float
    """Ranks of a stage that hold the same element of the KV, on average."""

    @property
    def total(self) -> int:
        """All of it."""
        own = self.reserve + self.weights + self.activations + self.exchange
        return own + self.kv_pool + self.states

    @property
    def resident(self) -> int:
        """Size of the process once all of its pool is in use."""
        return self.total - self.exchange + self.mapped_exchange

    @property
    def headroom(self) -> int:
        """What stays free."""
        return self.device - self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """In tokens."""

    tokens_total: int
    """That the pools of all replicas store."""
    tokens_per_rank: int
    """Positions that one rank keeps."""
    prefix_unit: int
    """`V`: a shared prefix is found in whole units, and its rest by comparison."""
    longest_prompt: int
    """That is accepted, with one token after it."""
    window: int


@dataclass(frozen=True, kw_only=True)
class PlannedEngine:
    """A layout as an engine would resolve it on a sheet's device."""

    settings: Settings
    resolved: ResolvedConfig
    topology: Topology
    weights: tuple[RankWeights, ...]
    """Of one rank of each pipeline stage, the one that holds most."""
    memory: MemorySheet
    room: Room

    @property
    def parallel(self) -> ParallelConfig:
        """Degrees and exchanges."""
        return self.resolved.parallel

    @property
    def chunk(self) -> int:
        """Rows of the largest step."""
        return self.resolved.scheduler.max_num_batched_tokens

    def concurrency(self, num_tokens: int) -> int:
        """Sequences of a length that the pools of all replicas hold at once, within the limits of
        the scheduler.

        Args:
            num_tokens: prompt and completion, at least 1.
        """
        replicas = self.parallel.data_parallel_size
        most = self.resolved.scheduler.max_num_seqs
        unit_blocks = sum(
            blocks_needed(group.visibility, unit, num_tokens, self.chunk)
            for group, unit in self._groups
        )
        if unit_blocks:
            most = min(most, (self.resolved.num_blocks - 1) // unit_blocks)
        if self.resolved.num_state_slots:
            most = min(most, self.resolved.num_state_slots - 1)
        return replicas * most

    @cached_property
    def _groups(self) -> list[tuple[CacheGroup, int]]:
        size = self.resolved.cache.block_size
        return [(group, group.world_size * size) for group in self.topology.groups]


def plan_engine(
    settings: Settings, parallel: ParallelConfig, costs: LinkCosts | None = None
) -> PlannedEngine:
    """Resolve a layout on a device and weigh it.

    Args:
        settings: model, device, and what does not depend on the layout.
        parallel: a layout.
        costs: prices with which exchanges are chosen; None: of the sheet, for the DCP group.
    Raises:
        TopologyError: the layout is not legal.
        DoesNotFit: a rank would need more than its device has.
        ConfigError: another setting is not legal.
        UnsupportedError: a model whose parameters cannot be counted.
    """
    if costs is None:
        costs = _costs(settings, parallel)
    # A pool of any size tells what everything else takes.
    draft = _resolve(settings, parallel, costs, _AMPLE_BLOCKS)
    topology = Topology.from_resolved(draft)
    weights, heaviest = _weigh(draft, topology)
    step = StepMemory(draft, topology, heaviest)
    taken = {
        "reserve": int(settings.sheet.reserve_bytes.value),
        "weights": weights[topology.mesh.coord_of(heaviest).pp].num_bytes,
        "activations": step.activation_bytes,
        "exchange": step.exchange_bytes[1],
    }
    device = settings.rank_memory_bytes(parallel.world_size)
    pool = settings.cache.kv_cache_memory_bytes
    if pool is None:
        pool = (device - sum(taken.values())) // _GRAIN * _GRAIN
    _check_room(settings, draft, topology, taken, pool, device)
    cache = replace(settings.cache, kv_cache_memory_bytes=pool)
    resolved = _resolve(replace(settings, cache=cache), parallel, costs, None)
    memory = _memory_sheet(resolved, topology, weights, step, taken, device)
    return PlannedEngine(
        settings=settings,
        resolved=resolved,
        topology=topology,
        weights=weights,
        memory=memory,
        room=room_of(resolved, topology),
    )


def room_of(resolved: ResolvedConfig, topology: Topology) -> Room:
    """Room for tokens, as the accounting of an engine has it (`heddle.engine.capacity`).

    Args:
        resolved: a legal configuration.
        topology: of it.
    """
    size, parallel = resolved.cache.block_size, resolved.parallel
    rules = [(group.visibility, group.world_size * size) for group in topology.groups]
    unit = rules[0][1] if rules else DEFAULT_STATE_UNIT
    usable_blocks = resolved.num_blocks - 1
    pinned = num_pinned_blocks(
        resolved.cache.max_pinned_tokens,
        unit,
        usable_blocks,
        has_states=resolved.num_state_slots > 0,
    )
    most_rows = resolved.scheduler.max_num_batched_tokens
    usable = longest_sequence(rules, usable_blocks - pinned, most_rows)
    window = resolved.scheduler.max_model_len
    return Room(
        tokens_total=usable_blocks * unit * parallel.data_parallel_size,
        tokens_per_rank=usable_blocks * size,
        prefix_unit=unit,
        longest_prompt=min(window - 1, usable),
        window=window,
    )


def _costs(settings: Settings, parallel: ParallelConfig) -> LinkCosts:
    rates = settings.sheet.rates(
        settings.dtype, devices_per_rank=settings.devices_per_rank(parallel.world_size)
    )
    plane = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
    return rates.link_costs(range(plane))


def _resolve(
    settings: Settings, parallel: ParallelConfig, costs: LinkCosts, num_blocks: int | None
) -> ResolvedConfig:
    cache = settings.cache
    if num_blocks is not None:
        cache = replace(cache, kv_cache_memory_bytes=None, num_blocks_override=num_blocks)
    is_cpu = settings.sheet.kind == "cpu"
    config = EngineConfig(
        model=settings.model_name,
        parallel=parallel,
        cache=cache,
        scheduler=settings.scheduler_of(parallel),
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        link_costs=costs,
    )
    return resolve(
        config,
        settings.model,
        free_memory_bytes=settings.rank_memory_bytes(parallel.world_size),
        num_cores=settings.num_devices if is_cpu else parallel.world_size,
        has_numba=is_cpu,
        shared_memory_refusal=None if is_cpu else f"ranks compute on {settings.sheet.name}",
        model_path=settings.model_path,
    )


def _weigh(resolved: ResolvedConfig, topology: Topology) -> tuple[tuple[RankWeights, ...], int]:
    """The heaviest rank of each stage, and the heaviest of all."""
    found: list[RankWeights] = []
    heaviest, most = 0, -1
    for stage in range(topology.mesh.pp_size):
        ranks = distinct_shares(topology, stage)
        weighed = {rank: rank_weights(resolved, topology, rank) for rank in ranks}
        rank = max(weighed, key=lambda each: weighed[each].num_bytes)
        found.append(weighed[rank])
        if weighed[rank].num_bytes > most:
            heaviest, most = rank, weighed[rank].num_bytes
    return tuple(found), heaviest


def _check_room(
    settings: Settings,
    draft: ResolvedConfig,
    topology: Topology,
    taken: dict[str, int],
    pool: int,
    device: int,
) -> None:
    least = token_bytes(topology) * draft.cache.block_size * (len(topology.groups) + 1)
    least += state_slot_bytes(draft.model, draft.parallel, draft.dtype) * 4
    needed = sum(taken.values()) + max(least, pool if settings.cache.kv_cache_memory_bytes else 0)
    if needed <= device and pool >= least:
        return
    parts = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in taken.items())
    raise DoesNotFit(
        f"a rank needs {parts} and a KV pool of at least {max(needed - sum(taken.values()), 0):,} "
        f"bytes, and {settings.sheet.name} has {device / 1e9:.1f} GB for it",
        needed,
    )


def token_bytes(topology: Topology) -> int:
    """KV bytes of one stored position on the rank that stores most: layers of a stage in the
    largest cache group, times kv heads of a slice, times the bytes of a row.

    Layers of other groups take blocks of their own from the same pool.
    """
    stages = topology.mesh.pp_size
    tensors = max_stage_tensors(topology.groups, topology.model.num_layers, stages)
    row = row_format(topology.model, topology.kv_cache_dtype).row_bytes
    return tensors * topology.heads.max_stored_kv_heads * row


def _memory_sheet(
    resolved: ResolvedConfig,
    topology: Topology,
    weights: tuple[RankWeights, ...],
    step: StepMemory,
    taken: dict[str, int],
    device: int,
) -> MemorySheet:
    mesh, size = topology.mesh, token_bytes(topology)
    slot = state_slot_bytes(resolved.model, resolved.parallel, resolved.dtype)
    blocks = resolved.num_blocks if topology.groups else 0
    copies = topology.heads.kv_copies(mesh.pcp_size, mesh.dcp_size)
    return MemorySheet(
        device=device,
        **taken,
        replicated_weights=weights[mesh.coord_of(step.global_rank).pp].replicated_bytes,
        kv_pool=blocks * resolved.cache.block_size * size,
        states=resolved.num_state_slots * slot,
        mapped_exchange=step.exchange_bytes[0],
        token=size,
        kv_copies=float(copies),
    )
