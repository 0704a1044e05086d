"""Prompts through a model step by step on thread ranks, with real caches and no engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from heddle.attention.backends import create_backend
from heddle.attention.resources import AttentionResources
from heddle.attention.row_codec import PlainRows
from heddle.attention.step_attention import RankAttention
from heddle.attention.storage import KVStore
from heddle.comm.base import World
from heddle.comm.threads import ThreadGroup
from heddle.config.model import ModelConfig
from heddle.layout.mesh import Mesh
from heddle.models.base import RowInputs
from heddle.models.registry import create_model
from heddle.models.weights.open import open_weights
from heddle.runner.guard import ScheduleGuard
from heddle.step.batch import GlobalBatch, ScheduledRequest
from heddle.step.localize import localize
from heddle.step.packed import pack_table
from heddle.step.plan import plan
from heddle.step.schedule import collective_schedule
from heddle.step.topology import Topology
from tests.support.attention_bench import form_groups
from tests.support.checkpoints import CPU, head_layout

BLOCK_SIZE = 4


def model_topology(
    config: ModelConfig, sizes: tuple[int, int, int], dtype: str, interleave: int = 2
) -> Topology:
    """A topology for a real model; every choice is automatic."""
    tp, pcp, dcp = sizes
    mesh = Mesh(tp_size=tp, pcp_size=pcp, dcp_size=dcp)
    return Topology(
        mesh=mesh,
        heads=head_layout(config, tp, mesh.slice_size),
        model=config,
        interleave_size=interleave,
        block_size=BLOCK_SIZE,
        dtype=dtype,
        kv_cache_dtype=dtype,
        context_workspace_tokens=64,
    )


def step_batches(
    topology: Topology, prompts: Sequence[Sequence[int]], cuts: Sequence[Sequence[int]]
) -> list[GlobalBatch]:
    """One batch per step: `cuts[s][i]` is how far prompt i has come after step s.

    The model has one cache group, and the whole block table of a prompt is its own from the start.
    """
    virtual = topology.kv_layout().virtual_block_size
    tables: list[tuple[int, ...]] = []
    for prompt in prompts:
        first = 1 + sum(map(len, tables))
        tables.append(tuple(reversed(range(first, first - (-len(prompt) // virtual)))))
    done, batches = [0] * len(prompts), []
    for step, ends in enumerate(cuts):
        requests = tuple(
            ScheduledRequest(
                request_id=index,
                token_ids=tuple(prompts[index][done[index] : end]),
                num_computed_tokens=done[index],
                packed_tables=(pack_table(tables[index]),),
                layout_fingerprint=topology.fingerprint(),
            )
            for index, end in enumerate(ends)
            if end > done[index]
        )
        batches.append(GlobalBatch(epoch=0, step=step, requests=requests))
        done = list(ends)
    return batches


def run_steps(
    path: Path, topology: Topology, batches: Sequence[GlobalBatch]
) -> list[dict[tuple[int, int], torch.Tensor]]:
    """Rows `[E]` of the last layer by (request, position), as each rank has them.

    Every call but those of the model itself is held against the schedule.
    """
    dtype: torch.dtype = getattr(torch, topology.dtype)
    blocks = 1 + max(b for batch in batches for r in batch.requests for b in r.block_tables[0])

    def body(world: World) -> dict[tuple[int, int], torch.Tensor]:
        guard = ScheduleGuard()
        groups = form_groups(topology, world, guard)
        tp_rank = topology.mesh.coord_of(world.global_rank).tp
        model = create_model(
            topology.model, topology.heads, tp_rank, open_weights(path), dtype, CPU, groups.tp
        )
        store = KVStore(
            tensor_of_layer={layer: layer for layer in range(topology.model.num_layers)},
            num_blocks=blocks,
            block_size=BLOCK_SIZE,
            num_heads=1,
            codec=PlainRows(topology.model.stored_row_width, dtype),
            device=CPU,
        )
        for rows in store.tensors:
            rows.fill_(torch.nan)
        resources = AttentionResources(topology, store, groups, create_backend("torch"), tp_rank)
        found: dict[tuple[int, int], torch.Tensor] = {}
        for batch in batches:
            step_plan = plan(batch, topology)
            step = localize(step_plan, topology, world.global_rank)
            schedule = collective_schedule(step_plan, topology, world.global_rank)
            guard.begin([*schedule.prologue, *(c for layer in schedule.layers for c in layer)])
            with torch.inference_mode():
                tokens, positions = torch.tensor(step.token_ids), torch.tensor(step.positions)
                hidden = model.forward(RowInputs(tokens, positions), RankAttention(step, resources))
            guard.finish()
            count = step.num_local_rows
            valid = step_plan.rows.valid[step.pcp_rank * count : (step.pcp_rank + 1) * count]
            for place, row in enumerate(step_plan.rows.local_rows(step.pcp_rank).tolist()):
                if valid[place]:
                    request = batch.requests[step.rows.request[row]].request_id
                    found[request, int(step.rows.position[row])] = hidden[place]
        return found

    return ThreadGroup(topology.mesh.world_size).run(body)
