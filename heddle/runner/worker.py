"""One rank: weights, KV rows and groups; turns a global batch into this rank's reply.

    GlobalBatch --plan--> StepPlan --localize--> RankStep --model--> hidden rows --restore--> logits
    --sample--> reply

The stages of a pipeline hand hidden rows on, each rank to the one at its place of the next stage;
the last one restores their order and samples.

Ranks hold no request state, so any of them can be replaced.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from heddle.attention.backends import create_backend
from heddle.attention.backends.base import AttentionBackend, PagedBackend
from heddle.attention.recurrent.store import StateStore
from heddle.attention.resources import AttentionResources
from heddle.attention.row_codec import create_row_codec
from heddle.attention.step_attention import RankAttention
from heddle.attention.storage import KVStore
from heddle.comm.base import RankGroups, World
from heddle.comm.counting import CollectiveCounts, count_groups
from heddle.comm.rank_clock import RankClock
from heddle.config.engine import ResolvedConfig
from heddle.errors import PlanMismatch, UnsupportedError
from heddle.faults.watch import RankWatch, phase_of
from heddle.kernels.recording.cuda_graphs import CudaGraphApi
from heddle.kernels.recording.graphs import Graphs
from heddle.kernels.recording.player import Player
from heddle.kernels.recording.recordings import Recordings
from heddle.kernels.registry import Kernels, create_kernels
from heddle.layout.cache_rows import row_format
from heddle.layout.mesh import GROUP_KINDS, GroupKind
from heddle.models.adapters.slots import AdapterSlots
from heddle.models.adapters.store import AdapterStore
from heddle.models.layers.expert_group import ExpertGroup, ExpertLoad
from heddle.models.registry import create_model
from heddle.models.weights.manifest import check_manifest
from heddle.models.weights.open import open_weights
from heddle.models.weights.source import WeightSource
from heddle.runner.damage import create_damage
from heddle.runner.guard import ScheduleGuard, guard_groups
from heddle.runner.kv_tags import KVTags
from heddle.runner.results import collect_samples
from heddle.runner.row_inputs import create_row_inputs
from heddle.step.batch import GlobalBatch, RankReply, SampledToken
from heddle.step.header import StepGate
from heddle.step.localize import RankStep, localize
from heddle.step.padding import pad_rows, unlike_reason
from heddle.step.plan import StepPlan, plan
from heddle.step.probe import NO_PROBE
from heddle.step.schedule import collective_schedule
from heddle.step.sketch import sketch_plan
from heddle.step.timeline import Part, StepTimeline
from heddle.step.topology import Topology

COMPUTE_DEVICE = torch.device("cpu")


class RankWorker:
    """Everything that lives on one rank.

    Raises:
        UnsupportedError: the attention backend cannot serve the model; carries every reason.
    """

    def __init__(
        self,
        resolved: ResolvedConfig,
        global_rank: int,
        world: World,
        on_progress: Callable[[int, int], None] | None = None,
        *,
        source: WeightSource | None = None,
        device: torch.device = COMPUTE_DEVICE,
        watch: RankWatch | None = None,
    ) -> None:
        """Load.

        Args:
            resolved: what runs.
            global_rank: which rank this is.
            world: its way to the others.
            on_progress: told (tensors loaded, tensors in all).
            source: of the weights; None: the checkpoint at `resolved.model_path`.
            device: of all tensors; a rank on `meta` is only weighed.
            watch: told where this rank stands; None: nobody looks.
        """
        self._watch = watch or RankWatch()
        self.topology = Topology.from_resolved(resolved)
        self.global_rank = global_rank
        self._gate = StepGate(global_rank, resolved.epoch, self.topology.layout_id)
        self._num_bad_rows = 0
        self.coord = self.topology.mesh.coord_of(global_rank)
        self.guard = ScheduleGuard(self._watch)
        self._damage = create_damage(self._watch, self.topology.mesh.dcp_size)
        self._clock = RankClock() if resolved.trace_file is not None else None
        self._trace_steps = resolved.trace_steps
        self._counts = CollectiveCounts(self._clock)
        groups = count_groups(_form_groups(self.topology, world), self._counts)
        self.groups = guard_groups(groups, self.guard)
        if self._damage is not None:
            self.groups = self._damage.groups(self.groups)
        self._watch.enter("load")
        self.dtype: torch.dtype = getattr(torch, resolved.dtype)
        self.device = device
        backend = self._create_backend(resolved)
        if self._damage is not None:
            backend = self._damage.backend(backend)
        kernels = create_kernels(resolved.kernels, resolved.num_threads)
        if source is None:
            source = _open_checked_weights(resolved, global_rank)
        self.experts = _create_experts(self.topology, self.groups)
        slots: list[AdapterSlots] = []
        self.model = create_model(
            resolved.model,
            self.topology.heads,
            self.coord.tp,
            source,
            self.dtype,
            self.device,
            self.groups.tp,
            on_progress,
            stage=(self.coord.pp, self.topology.mesh.pp_size),
            experts=self.experts,
            replicates_queries=self.topology.replicates_queries,
            adapter_slots=slots if resolved.adapters.enable_lora else None,
            kernels=kernels,
            quantization=resolved.quantization,
        )
        self.adapters = AdapterStore(slots, self.dtype, device)
        self.store = self._create_store(resolved, kernels)
        self._tags = (
            KVTags(self.topology, global_rank, resolved.num_blocks) if resolved.debug_kv else None
        )
        self.states = self._create_states(resolved)
        self.resources = AttentionResources(
            self.topology,
            self.store,
            self.groups,
            backend,
            self.coord.tp,
            self.states,
            kernels,
            None if self._fails_in_layers else _create_recordings(resolved, backend, device),
            self._clock,
        )
        self._watch.enter("warmup")

    @property
    def _fails_in_layers(self) -> bool:
        """Some fault waits in a layer, where a step that is repeated would not pass by."""
        return self._watch.injector is not None and self._watch.injector.reaches_layers

    def _create_backend(self, resolved: ResolvedConfig) -> AttentionBackend:
        """The backend, once it is known to serve this model; asked before any weight is read."""
        backend = create_backend(resolved.backend, resolved.num_threads)
        reasons = backend.unsupported_reasons(
            dtype=self.dtype,
            device=COMPUTE_DEVICE,
            key_width=resolved.model.stored_key_width,
            value_width=resolved.model.partial_width,
        )
        if reasons:
            raise UnsupportedError(
                f"attention_backend={backend.name} cannot serve this model: {'; '.join(reasons)}"
            )
        return backend

    def _create_store(self, resolved: ResolvedConfig, kernels: Kernels) -> KVStore:
        topology = self.topology
        return KVStore(
            tensor_of_layer=topology.tensor_of_layer(topology.stage_layers(self.global_rank)),
            num_blocks=resolved.num_blocks,
            block_size=resolved.cache.block_size,
            num_heads=topology.heads.num_stored_kv_heads(topology.mesh.slice_of(self.coord.tp)),
            codec=create_row_codec(row_format(resolved.model, resolved.kv_cache_dtype), kernels),
            device=self.device,
            kernels=kernels,
        )

    def _create_states(self, resolved: ResolvedConfig) -> StateStore | None:
        layout = self.topology.recurrent_layout
        layers = self.topology.recurrent_layers(self.topology.stage_layers(self.global_rank))
        if layout is None or not layers:
            return None
        return StateStore(
            layout,
            self.coord.tp,
            layers=layers,
            num_slots=resolved.num_state_slots,
            dtype=self.dtype,
            device=self.device,
        )

    @property
    def is_deciding(self) -> bool:
        """True on the one rank of a replica that chooses tokens."""
        return self.is_last_stage and self.coord.pcp == 0 and self.coord.tp == 0

    @property
    def is_last_stage(self) -> bool:
        """This rank holds the last layers."""
        return self.topology.mesh.is_last_stage(self.global_rank)

    def execute(self, batch: GlobalBatch, digest: int, deadline: float | None = None) -> RankReply:
        """Run one step, if it is the next one of this rank; arguments as of `run_step`.

        Raises:
            PlanMismatch: it is another step, or of another life or layout, or this rank derives
                another plan; raised before its first collective.
        """
        self._watch.begin_step(batch.step, phase_of(batch))
        if self._damage is not None:
            batch, digest = self._damage.received(batch, digest)
        self._gate.admit(batch)
        return self.run_step(batch, digest, deadline)

    def run_step(self, batch: GlobalBatch, digest: int, deadline: float | None = None) -> RankReply:
        """Run any step.

        Args:
            batch: the whole batch.
            digest: of the plan that the driver derived from it.
            deadline: monotonic time by which every collective must have ended.
        Raises:
            PlanMismatch: this rank derives another plan; raised before its first collective.
        """
        started = time.monotonic()
        if self._clock is not None:
            self._clock.begin_step()
        step_plan = plan(batch, self.topology)
        if step_plan.digest != digest:
            raise PlanMismatch(
                f"step {batch.step}: rank {self.global_rank} derives plan "
                f"{step_plan.digest:#018x}, the driver announced {digest:#018x}; nothing was run",
                sketch=sketch_plan(step_plan, self.topology, self.global_rank),
            )
        for kind in GROUP_KINDS:
            self.groups.of(kind).set_deadline(deadline)
        step = localize(step_plan, self.topology, self.global_rank)
        if self._damage is not None:
            step = self._damage.placed(step)
        recordings = self.resources.recordings
        num_repeated = 0 if recordings is None else recordings.num_repeated
        # What is recorded cannot be looked at.
        num_rows = self._num_rows(step_plan) if batch.probe == NO_PROBE else None
        with torch.inference_mode():
            attention = RankAttention(step, self.resources, num_rows)
            sampled = self._run(step if num_rows is None else pad_rows(step, num_rows), attention)
        return RankReply(
            epoch=batch.epoch,
            step=batch.step,
            digest=step_plan.digest,
            coverage=attention.coverage,
            call_hashes=self.guard.call_hashes,
            num_bad_rows=self._num_bad_rows,
            sampled=sampled,
            probe=tuple(attention.probe),
            seconds=time.monotonic() - started,
            collectives=self._counts.take(),
            recordings=None if recordings is None else recordings.use_since(num_repeated),
            timeline=self._timeline(batch.step),
        )

    def _timeline(self, step: int) -> StepTimeline | None:
        """None once the steps of this life alone have filled the trace; it may be full earlier."""
        if self._clock is None or 0 < self._trace_steps <= step:
            return None
        return self._clock.end_step()

    def _enter(self, part: Part) -> None:
        if self._clock is not None:
            self._clock.enter(part)

    def _num_rows(self, step_plan: StepPlan) -> int | None:
        """COPY rows of a step that is computed like others, pads included."""
        recordings, num_copy = self.resources.recordings, step_plan.rows.num_copy
        if recordings is None:
            return None
        return recordings.num_rows(num_copy, partial(unlike_reason, step_plan, self.topology))

    def _run(self, step: RankStep, attention: RankAttention) -> tuple[SampledToken, ...]:
        self._num_bad_rows = 0
        self._prepare(step.plan.batch)
        schedule = collective_schedule(step.plan, self.topology, self.global_rank)
        self.guard.begin(schedule)
        first_layer = self.topology.stage_layers(self.global_rank).start
        self._watch.expect(schedule.layer_ends, first_layer)
        self._enter("embedding")
        hidden = self.model.forward(
            create_row_inputs(step, self.topology.model, self.dtype),
            attention if self._damage is None else self._damage.ops(attention, step),
            self._receive_hidden(step),
        )
        if not self.is_last_stage:
            self.groups.pp.send(hidden, self.coord.pp + 1)
            self.guard.finish()
            return ()
        self._enter("logits")
        logits = self._logits(step.plan, hidden)
        self.guard.finish()
        if logits is None or not self.is_deciding:
            return ()
        return self._sample(step.plan.batch, logits)

    def _sample(self, batch: GlobalBatch, logits: torch.Tensor) -> tuple[SampledToken, ...]:
        self._watch.enter("sample")
        self._enter("sampling")
        if self._damage is None:
            return collect_samples(batch, logits)
        sampled = collect_samples(batch, self._damage.logits(batch, logits))
        return self._damage.sampled(batch, sampled)

    def _receive_hidden(self, step: RankStep) -> torch.Tensor | None:
        """`[M, E]` from the stage before; None on the first."""
        if self.coord.pp == 0:
            return None
        shape = (len(step.token_ids), self.topology.model.hidden_size)
        return self.groups.pp.receive(shape, self.dtype, self.coord.pp - 1)

    def _prepare(self, batch: GlobalBatch) -> None:
        """Change adapters; wipe, copy on write, take and resume snapshots, before anything is
        written.
        """
        for change in batch.adapter_changes:
            self.adapters.change(change.slot, change.path)
        if self.states is not None:
            self.states.copy(batch.state_copies)
        if self._tags is not None and batch.kv_debug is not None:
            self.store.spoil(batch.kv_debug.freed_blocks)
        self.store.wipe(batch.wiped_blocks)
        places = [
            (
                self.topology.kv_layout(copy.group, copy.start_rank),
                self.topology.group_position(copy.group, self.global_rank),
            )
            for copy in batch.copies
        ]
        self.store.copy_blocks(batch.copies, places)
        if self._tags is not None:
            self._tags.begin_step(batch)

    def _logits(self, step_plan: StepPlan, hidden: torch.Tensor) -> torch.Tensor | None:
        """`[rows that feed sampling, vocabulary]` on PCP rank 0, in batch order; None elsewhere.

        Order is restored here: of all hidden rows only these cross the PCP group, and only if one
        lies elsewhere.
        """
        rows = step_plan.logits
        if rows.num_rows == 0:
            return None
        picked = hidden.index_select(0, torch.tensor(rows.local_rows[self.coord.pcp]))
        # The largest number of a row is NaN or inf where any is.
        largest = torch.linalg.vector_norm(picked, ord=math.inf, dim=-1)
        self._num_bad_rows = int((~largest.isfinite()).sum())
        if rows.crosses_pcp:
            picked = self.groups.pcp.all_gather(picked).flatten(0, 1)
        if self.coord.pcp != 0:
            return None
        return self.model.logits(picked.index_select(0, torch.tensor(rows.order)))


def _open_checked_weights(resolved: ResolvedConfig, global_rank: int) -> WeightSource:
    """The checkpoint, held to its manifest; with a named one, rank 0 sums up every file anew."""
    named = resolved.weights_manifest
    check_manifest(
        Path(resolved.model_path),
        None if named is None else Path(named),
        trusts_memory=named is None or global_rank != 0,
    )
    return open_weights(resolved.model_path)


def _create_recordings(
    resolved: ResolvedConfig, backend: AttentionBackend, device: torch.device
) -> Player | None:
    """Steps that look alike are captured where that was asked for, and else recorded where compiled
    kernels launch.
    """
    if resolved.cuda_graphs:
        return _create_graphs(backend, device)
    if resolved.enforce_eager or resolved.kernels != "numba":
        return None
    return Recordings(resolved.num_threads)


def _create_graphs(backend: AttentionBackend, device: torch.device) -> Graphs | None:
    """None on a rank that is only weighed."""
    if not isinstance(backend, PagedBackend):
        raise UnsupportedError(
            f"attention_backend={backend.name} cannot serve cuda_graphs: it meets stored rows "
            "request by request, and a graph needs one call for all of them"
        )
    return None if device.type == "meta" else Graphs(CudaGraphApi(device))


def _form_groups(topology: Topology, world: World) -> RankGroups:
    """Form every group, in the same order on every rank."""
    members = {kind: world.group(kind, _members(topology, kind)) for kind in GROUP_KINDS}
    return RankGroups(**members)


def _create_experts(topology: Topology, groups: RankGroups) -> ExpertGroup | None:
    """Among whom experts are dealt; a group of one holds them all and deals nothing."""
    moe = topology.model.moe
    if moe is None or groups.ep.world_size == 1:
        return None
    return ExpertGroup(groups.ep, groups.pcp, ExpertLoad(moe.num_experts))


def _members(topology: Topology, kind: GroupKind) -> Sequence[Sequence[int]]:
    """The groups of a kind; experts are dealt out only when asked for."""
    if kind == "ep" and not topology.has_expert_parallel:
        return [(rank,) for rank in range(topology.mesh.world_size)]
    return topology.mesh.groups(kind)
