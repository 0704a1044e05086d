"""One step's attention on thread ranks against dense attention.

The caches start full of NaN; the oracle and the placement of cached rows are written out here and
use nothing of the package.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from heddle.attention.backends import create_backend
from heddle.attention.resources import AttentionResources
from heddle.attention.row_codec import PlainRows, RowCodec, create_row_codec
from heddle.attention.step_attention import RankAttention
from heddle.attention.storage import KVStore
from heddle.comm.base import RankGroups, World
from heddle.comm.threads import ThreadGroup
from heddle.comm.tracing import Trace, TracingWorld
from heddle.config import MLAConfig, ModelConfig
from heddle.layout.cache_rows import row_format
from heddle.layout.heads import HeadLayout
from heddle.layout.mesh import GROUP_KINDS
from heddle.runner.guard import ScheduleGuard, guard_groups
from heddle.step.batch import GlobalBatch
from heddle.step.localize import localize
from heddle.step.plan import plan
from heddle.step.schedule import collective_schedule
from heddle.step.topology import Topology
from tests.support.visible import seen_by

NOPE, ROPE, LATENT, VALUE = 6, 4, 10, 5


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """One query `[D]` over `[S, D]`, `[S, Dv]`."""
    return torch.softmax(key @ query * scale, dim=0) @ value


@dataclass(frozen=True)
class Truth:
    """Global queries and stored rows of a step, and what each row must give."""

    query: list[torch.Tensor]
    """Per request `[q, H, D]`."""
    rows: list[torch.Tensor]
    """Per request `[C + q, K, W]`."""
    expected: list[torch.Tensor]
    """Per request `[q, H, Dv]`."""


def gqa_expected(
    model: ModelConfig,
    query: torch.Tensor,
    rows: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`[q, H, D]`: the last q positions of `rows` `[C + q, K, 2D]`, each over the keys it sees."""
    heads, kv_heads, width = model.num_query_heads, model.num_kv_heads, model.head_dim
    cached, rule = len(rows) - len(query), model.kind_of(0).visibility
    scale = width**-0.5 if model.attention_scale is None else model.attention_scale
    out = torch.empty_like(query)
    for i in range(len(query)):
        keys = seen_by(rule, cached + i)
        for j in range(heads):
            key, value = rows[keys, j * kv_heads // heads].split(width, dim=-1)
            scores = key @ query[i, j] * scale
            if model.attention_softcap:
                scores = model.attention_softcap * torch.tanh(scores / model.attention_softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[j : j + 1].to(scores.dtype)])
            shares = torch.softmax(scores, dim=0)[: len(keys)]
            out[i, j] = shares @ value
    return out


def in_float64(
    topology: Topology,
    truth: Truth,
    rounded: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
) -> Truth:
    """The same inputs; what they must give is computed in float64, of rows as a cache has them."""
    model = topology.model
    expected = [
        gqa_expected(model, query.double(), rounded(rows).double())
        for query, rows in zip(truth.query, truth.rows, strict=True)
    ]
    return Truth(truth.query, truth.rows, expected)


def gqa_truth(
    topology: Topology,
    batch: GlobalBatch,
    dtype: torch.dtype,
    sinks: torch.Tensor | None = None,
) -> Truth:
    generator = torch.Generator().manual_seed(len(batch.requests))
    model = topology.model
    heads, kv_heads, width = model.num_query_heads, model.num_kv_heads, model.head_dim
    truth = Truth([], [], [])
    for request in batch.requests:
        new, cached = len(request.token_ids), request.num_computed_tokens
        query = torch.randn(new, heads, width, generator=generator, dtype=dtype)
        rows = torch.randn(cached + new, kv_heads, 2 * width, generator=generator, dtype=dtype)
        rows *= torch.arange(1, kv_heads + 1).to(dtype)[:, None]
        truth.query.append(query)
        truth.rows.append(rows)
        truth.expected.append(gqa_expected(model, query, rows, sinks))
    return truth


def fill_cache(
    topology: Topology, batch: GlobalBatch, truth: Truth, store: KVStore, place: int, kv: slice
) -> None:
    """Put the cached rows where the placement formula says, all else stays NaN."""
    run, block = topology.interleave_size, topology.block_size
    ranks = topology.groups[0].world_size
    place = place if ranks > 1 else 0
    for layer in store.tensors:
        layer.view(torch.uint8).fill_(255)  # NaN in every type
        for request, rows in zip(batch.requests, truth.rows, strict=True):
            for t in range(request.num_computed_tokens):
                index = t // (ranks * run) * run + t % run
                page = request.block_tables[0][index // block]
                if (t // run) % ranks == place and page != 0:
                    layer[page * block + index % block] = store.codec.encode(rows[t, kv])


def _codec(topology: Topology, rows: torch.Tensor) -> RowCodec:
    """That of the topology where it is a quantised one; else rows are kept as they come."""
    asked = row_format(topology.model, topology.kv_cache_dtype)
    return create_row_codec(asked) if asked.is_quantized else PlainRows(rows.shape[-1], rows.dtype)


def form_groups(topology: Topology, world: World, guard: ScheduleGuard) -> RankGroups:
    members = {kind: world.group(kind, topology.mesh.groups(kind)) for kind in GROUP_KINDS}
    return guard_groups(RankGroups(**members), guard)


@dataclass(frozen=True)
class RankHeads:
    """Query heads of one rank."""

    own: range
    projected: tuple[int | None, ...]
    """Of each lane of its query; None: a pad lane. All of the slice where queries are replicated.
    """

    @classmethod
    def of(cls, topology: Topology, tp_rank: int) -> RankHeads:
        heads, k = topology.heads, topology.mesh.slice_size
        first = tp_rank // k * k
        ranks = range(first, first + k) if topology.replicates_queries else [tp_rank]
        lanes: list[int | None] = []
        for rank in ranks:
            held: list[int | None] = list(range(*heads.query_range(rank)))
            lanes += held + [None] * (heads.lanes - len(held))
        return cls(range(*heads.query_range(tp_rank)), tuple(lanes))


Call = Callable[[RankAttention, torch.Tensor, torch.Tensor, RankHeads], torch.Tensor]


@dataclass(frozen=True)
class RankResult:
    """What one rank found."""

    error: float
    """Largest difference to the truth over its rows and own heads."""
    trace: Trace
    out: torch.Tensor
    """Its rows without pads, own heads."""


def worst_error(
    topology: Topology, batch: GlobalBatch, truth: Truth, call: Call, backend: str
) -> float:
    """Run the step on thread ranks and compare every row and own head with the truth."""
    return max(result.error for result in run_ranks(topology, batch, truth, call, backend))


def run_ranks(
    topology: Topology, batch: GlobalBatch, truth: Truth, call: Call, backend: str
) -> list[RankResult]:
    """Run one layer of the step on thread ranks; every call is traced and held against the
    schedule.
    """
    step_plan = plan(batch, topology)
    dtype = truth.query[0].dtype
    flat_query = torch.cat(truth.query)
    flat_rows = torch.cat(
        [rows[r.num_computed_tokens :] for r, rows in zip(batch.requests, truth.rows, strict=True)]
    )
    flat_expected = torch.cat(truth.expected)

    def rank_body(inner: World) -> RankResult:
        world = TracingWorld(inner)
        rank = world.global_rank
        guard = ScheduleGuard()
        groups = form_groups(topology, world, guard)
        step = localize(step_plan, topology, rank)
        slice_index = topology.mesh.slice_of(step.tp_rank)
        kv = slice(*topology.heads.kv_range(slice_index))
        blocks = 1 + max(block for request in batch.requests for block in request.block_tables[0])
        store = KVStore(
            tensor_of_layer={0: 0},
            num_blocks=blocks,
            block_size=topology.block_size,
            num_heads=kv.stop - kv.start,
            codec=_codec(topology, flat_rows),
            device=torch.device("cpu"),
        )
        fill_cache(topology, batch, truth, store, step.dcp_rank, kv)
        resources = AttentionResources(
            topology, store, groups, create_backend(backend), step.tp_rank
        )
        schedule = collective_schedule(step_plan, topology, rank)
        layer = schedule.layers[0]
        guard.begin(layer[: len(layer) - 2 * (topology.mesh.tp_size > 1)])
        heads = RankHeads.of(topology, step.tp_rank)
        local = torch.tensor(step_plan.rows.local_rows(step.pcp_rank))
        query = torch.full(
            (len(local), len(heads.projected), flat_query.shape[-1]), 3.0, dtype=dtype
        )
        for lane, head in enumerate(heads.projected):
            if head is not None:
                query[:, lane] = flat_query[local, head]
        rows = flat_rows[local][:, kv].clone()
        found = call(RankAttention(step, resources), query, rows, heads)
        guard.finish()
        valid = step_plan.rows.valid.reshape(topology.mesh.pcp_size, -1)[step.pcp_rank]
        kept = torch.tensor(np.flatnonzero(valid))
        own = len(heads.own)
        assert found.shape[1] == topology.heads.lanes
        assert (found[:, own:] == 0).all(), "pad lanes hold zeros"
        found = found[kept, :own]
        difference = found - flat_expected[local[kept], heads.own.start : heads.own.stop]
        error = float(difference.abs().max()) if difference.numel() else 0.0
        return RankResult(error, world.trace, found)

    return ThreadGroup(topology.mesh.world_size).run(rank_body)


SINKS = torch.linspace(-2.0, 3.0, 12, dtype=torch.float64)
"""One learned logit per query head of the model of `make_model`."""


def call_gqa_with_sinks(
    attention: RankAttention, query: torch.Tensor, rows: torch.Tensor, heads: RankHeads
) -> torch.Tensor:
    key, value = rows.chunk(2, dim=-1)
    sinks = torch.zeros(attention.resources.topology.heads.lanes, dtype=torch.float64)
    sinks[: len(heads.own)] = SINKS[heads.own.start : heads.own.stop]
    return attention.gqa(0, query, key, value, sinks)


def call_gqa(
    attention: RankAttention,
    query: torch.Tensor,
    rows: torch.Tensor,
    heads: RankHeads,
) -> torch.Tensor:
    key, value = rows.chunk(2, dim=-1)
    return attention.gqa(0, query, key, value)


@dataclass(frozen=True)
class UpProjections:
    key_up: torch.Tensor  # [H, nope, lat]
    value_up: torch.Tensor  # [H, lat, v]


def mla_case(topology: Topology) -> tuple[Topology, UpProjections]:
    mla = MLAConfig(
        q_lora_rank=None,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=VALUE,
    )
    model = dataclasses.replace(topology.model, num_kv_heads=1, head_dim=NOPE + ROPE, mla=mla)
    heads = HeadLayout(
        num_query_heads=model.num_query_heads,
        num_kv_heads=1,
        tp_size=topology.mesh.tp_size,
        slice_size=topology.mesh.slice_size,
    )
    generator = torch.Generator().manual_seed(5)
    wide = torch.float64
    ups = UpProjections(
        torch.randn(model.num_query_heads, NOPE, LATENT, generator=generator, dtype=wide),
        torch.randn(model.num_query_heads, LATENT, VALUE, generator=generator, dtype=wide),
    )
    return dataclasses.replace(
        topology, model=model, heads=heads, dtype="float64", kv_cache_dtype="float64"
    ), ups


def mla_truth(topology: Topology, batch: GlobalBatch, ups: UpProjections) -> Truth:
    generator = torch.Generator().manual_seed(len(batch.requests))
    heads, wide = topology.model.num_query_heads, torch.float64
    rule = topology.model.kind_of(0).visibility
    truth = Truth([], [], [])
    for request in batch.requests:
        new, cached = len(request.token_ids), request.num_computed_tokens
        query = torch.randn(new, heads, NOPE + ROPE, generator=generator, dtype=wide)
        rows = torch.randn(cached + new, LATENT + ROPE, generator=generator, dtype=wide)
        latent, rope = rows[:, :LATENT], rows[:, LATENT:]
        key = torch.cat(
            (
                torch.einsum("tl,hdl->thd", latent, ups.key_up),
                rope[:, None].expand(-1, heads, -1),
            ),
            dim=-1,
        )
        value = torch.einsum("tl,hlv->thv", latent, ups.value_up)
        truth.query.append(query)
        truth.rows.append(rows[:, None])
        truth.expected.append(
            torch.stack(
                [
                    torch.stack(
                        [
                            dense(
                                query[i, j],
                                key[seen_by(rule, cached + i), j],
                                value[seen_by(rule, cached + i), j],
                                0.3,
                            )
                            for j in range(heads)
                        ]
                    )
                    for i in range(new)
                ]
            )
        )
    return truth


def make_mla_call(ups: UpProjections) -> Call:
    """A layer call with the heads of the up-projections that this rank asks for."""

    def call_mla(
        attention: RankAttention, query: torch.Tensor, rows: torch.Tensor, heads: RankHeads
    ) -> torch.Tensor:
        lanes = attention.resources.topology.heads.lanes
        key_up = torch.zeros((query.shape[1], NOPE, LATENT), dtype=torch.float64)
        value_up = torch.zeros((lanes, LATENT, VALUE), dtype=torch.float64)
        for lane, head in enumerate(heads.projected):
            if head is not None:
                key_up[lane] = ups.key_up[head]
        value_up[: len(heads.own)] = ups.value_up[heads.own.start : heads.own.stop]
        return attention.mla(
            0, query[..., :NOPE], query[..., NOPE:], rows[:, 0], key_up, value_up, 0.3
        )

    return call_mla
