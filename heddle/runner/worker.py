"""One rank: weights, KV rows and groups; turns a global batch into this rank's reply.

    GlobalBatch --plan--> StepPlan --localize--> RankStep --model--> hidden rows --restore--> logits
    --sample--> reply

Ranks hold no request state, so any of them can be replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from heddle.attention.backends import create_backend
from heddle.attention.backends.base import AttentionBackend
from heddle.attention.resources import AttentionResources
from heddle.attention.step_attention import RankAttention
from heddle.attention.storage import KVStore
from heddle.comm.base import RankGroups, World
from heddle.config.engine import ResolvedConfig
from heddle.errors import PlanMismatch, UnsupportedError
from heddle.layout.mesh import GROUP_KINDS
from heddle.models.registry import create_model
from heddle.models.weights.open import open_weights
from heddle.runner.guard import ScheduleGuard, guard_groups
from heddle.runner.results import collect_samples
from heddle.step.batch import GlobalBatch, RankReply, SampledToken
from heddle.step.localize import RankStep, localize
from heddle.step.plan import StepPlan, plan
from heddle.step.schedule import collective_schedule
from heddle.step.topology import Topology


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
    ) -> None:
        self.topology = Topology.from_resolved(resolved)
        self.global_rank = global_rank
        self.coord = self.topology.mesh.coord_of(global_rank)
        self.guard = ScheduleGuard()
        self.groups = guard_groups(_form_groups(self.topology, world), self.guard)
        self.dtype: torch.dtype = getattr(torch, resolved.dtype)
        self.device = torch.device("cpu")
        backend = self._create_backend(resolved)
        self.model = create_model(
            resolved.model,
            self.topology.heads,
            self.coord.tp,
            open_weights(resolved.model_path),
            self.dtype,
            self.device,
            self.groups.tp,
            on_progress,
        )
        self.store = self._create_store(resolved)
        self.resources = AttentionResources(
            self.topology, self.store, self.groups, backend, self.coord.tp
        )

    def _create_backend(self, resolved: ResolvedConfig) -> AttentionBackend:
        """The backend, once it is known to serve this model; asked before any weight is read."""
        backend = create_backend(resolved.backend)
        reasons = backend.unsupported_reasons(
            dtype=self.dtype,
            device=self.device,
            key_width=resolved.model.stored_key_width,
            value_width=resolved.model.partial_width,
        )
        if reasons:
            raise UnsupportedError(
                f"attention_backend={backend.name} cannot serve this model: {'; '.join(reasons)}"
            )
        return backend

    def _create_store(self, resolved: ResolvedConfig) -> KVStore:
        heads = self.topology.heads
        return KVStore(
            num_layers=resolved.model.num_layers,
            num_blocks=resolved.num_blocks,
            block_size=resolved.cache.block_size,
            num_heads=heads.num_stored_kv_heads(self.topology.mesh.slice_of(self.coord.tp)),
            row_width=resolved.model.stored_row_width,
            dtype=getattr(torch, resolved.kv_cache_dtype),
            device=self.device,
        )

    @property
    def is_deciding(self) -> bool:
        """True on the one rank that chooses tokens."""
        return self.coord.pcp == 0 and self.coord.tp == 0

    def execute(self, batch: GlobalBatch, digest: int, deadline: float | None = None) -> RankReply:
        """Run one step.

        Args:
            batch: the whole batch.
            digest: of the plan that the driver derived from it.
            deadline: monotonic time by which every collective must have ended.
        Raises:
            PlanMismatch: this rank derives another plan; raised before its first collective.
        """
        started = time.monotonic()
        step_plan = plan(batch, self.topology)
        if step_plan.digest != digest:
            raise PlanMismatch(
                f"step {batch.step}: rank {self.global_rank} derives plan "
                f"{step_plan.digest:#018x}, the driver announced {digest:#018x}; nothing was run"
            )
        for kind in GROUP_KINDS:
            self.groups.of(kind).set_deadline(deadline)
        step = localize(step_plan, self.topology, self.global_rank)
        with torch.inference_mode():
            sampled = self._run(step)
        return RankReply(
            epoch=batch.epoch,
            step=batch.step,
            digest=step_plan.digest,
            coverage=step.coverage,
            sampled=sampled,
            seconds=time.monotonic() - started,
        )

    def _run(self, step: RankStep) -> tuple[SampledToken, ...]:
        self._prepare_blocks(step.plan.batch, step.dcp_rank)
        self.guard.begin(collective_schedule(step.plan, self.topology, self.global_rank))
        hidden = self.model.forward(
            torch.tensor(step.token_ids),
            torch.tensor(step.positions),
            RankAttention(step, self.resources),
        )
        logits = self._logits(step.plan, hidden)
        self.guard.finish()
        if logits is None or not self.is_deciding:
            return ()
        return collect_samples(step.plan.batch, logits)

    def _prepare_blocks(self, batch: GlobalBatch, dcp_rank: int) -> None:
        """Wipe, then copy on write, before anything is written."""
        self.store.wipe(batch.wiped_blocks)
        layouts = [self.topology.kv_layout(copy.start_rank) for copy in batch.copies]
        self.store.copy_blocks(batch.copies, layouts, dcp_rank)

    def _logits(self, step_plan: StepPlan, hidden: torch.Tensor) -> torch.Tensor | None:
        """`[rows that feed sampling, vocabulary]` on PCP rank 0, in batch order; None elsewhere.

        Order is restored here: of all hidden rows only these cross the PCP group, and only if one
        lies elsewhere.
        """
        rows = step_plan.logits
        if rows.num_rows == 0:
            return None
        picked = hidden.index_select(0, torch.tensor(rows.local_rows[self.coord.pcp]))
        if rows.crosses_pcp:
            picked = self.groups.pcp.all_gather(picked).flatten(0, 1)
        if self.coord.pcp != 0:
            return None
        return self.model.logits(picked.index_select(0, torch.tensor(rows.order)))


def _form_groups(topology: Topology, world: World) -> RankGroups:
    """Form every group, in the same order on every rank."""
    members = {kind: world.group(kind, topology.mesh.groups(kind)) for kind in GROUP_KINDS}
    return RankGroups(**members)
