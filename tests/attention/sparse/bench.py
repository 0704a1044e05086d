"""One step's sparse rows on thread ranks against dense attention over the keys that a plain sort
chooses.

Cached and new rows are placed by the formula written out here, everything else in the store is NaN.
Index queries and keys are small integers, so that scores are exact in float32 and ties abound; or
they are drawn from a normal distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from heddle.attention.backends import create_backend
from heddle.attention.base import IndexRows
from heddle.attention.resources import AttentionResources
from heddle.attention.row_codec import PlainRows
from heddle.attention.sparse.create import create_sparse_rows
from heddle.attention.sparse.kind import SparseLatentKind
from heddle.attention.sparse.rows import SparseRows
from heddle.attention.storage import KVStore
from heddle.comm.base import World
from heddle.comm.threads import ThreadGroup
from heddle.config import MLAConfig
from heddle.config.model import SparseConfig
from heddle.layout.rows import RowClass, RowRequest
from heddle.runner.guard import ScheduleGuard
from heddle.step.batch import GlobalBatch, ScheduledRequest
from heddle.step.exchanges import ExchangeSizes
from heddle.step.localize import RankStep, localize
from heddle.step.placement import Placed
from heddle.step.plan import plan
from heddle.step.sparse import sparse_calls
from heddle.step.topology import Topology
from tests.support.attention_bench import form_groups
from tests.support.batches import make_topology

HEADS, NOPE, ROPE, LATENT, VALUE = 6, 6, 4, 10, 5
INDEX_HEADS, INDEX_WIDTH, TOP_K = 3, 8, 8
SCALE = 0.3
LATENTS = MLAConfig(
    q_lora_rank=None,
    kv_lora_rank=LATENT,
    qk_nope_head_dim=NOPE,
    qk_rope_head_dim=ROPE,
    v_head_dim=VALUE,
)


def copy_decodes(requests: Sequence[ScheduledRequest], topology: Topology) -> Placed:
    """One new row is copied, several are cut."""
    counts = [len(request.token_ids) for request in requests]
    kinds = {True: RowClass.COPY, False: RowClass.SPLIT}
    return Placed(tuple(RowRequest(count, kinds[count == 1]) for count in counts), ())


def sparse_topology(sizes: tuple[int, int, int], *, top_k: int = TOP_K, **options) -> Topology:  # type: ignore[no-untyped-def]
    """A topology in float64 whose model is sparse."""
    sparse = SparseConfig(num_heads=INDEX_HEADS, head_dim=INDEX_WIDTH, top_k=top_k)
    options.setdefault("row_policy", copy_decodes)
    topology = make_topology(
        sizes, num_query_heads=HEADS, num_kv_heads=1, mla=LATENTS, sparse=sparse, **options
    )
    return replace(topology, dtype="float64", kv_cache_dtype="float64")


@dataclass(frozen=True)
class Sequences:
    """Per request: queries of the new rows `[q, ...]`, stored rows `[C + q, ...]`."""

    query_nope: list[torch.Tensor]
    query_rope: list[torch.Tensor]
    index_query: list[torch.Tensor]
    weights: list[torch.Tensor]
    latent: list[torch.Tensor]
    index_key: list[torch.Tensor]
    key_up: torch.Tensor
    value_up: torch.Tensor


def draw_sequences(batch: GlobalBatch, *, has_ties: bool) -> Sequences:
    generator = torch.Generator().manual_seed(len(batch.requests))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def index(*shape: int) -> torch.Tensor:
        if not has_ties:
            return normal(*shape)
        return torch.randint(-1, 2, shape, generator=generator).double()

    news = [len(request.token_ids) for request in batch.requests]
    lengths = [r.num_computed_tokens + new for r, new in zip(batch.requests, news, strict=True)]
    return Sequences(
        query_nope=[normal(new, HEADS, NOPE) for new in news],
        query_rope=[normal(new, HEADS, ROPE) for new in news],
        index_query=[index(new, INDEX_HEADS, INDEX_WIDTH) for new in news],
        weights=[index(new, INDEX_HEADS) for new in news],
        latent=[normal(length, LATENT + ROPE) for length in lengths],
        index_key=[index(length, INDEX_WIDTH) for length in lengths],
        key_up=normal(HEADS, NOPE, LATENT),
        value_up=normal(HEADS, LATENT, VALUE),
    )


def chosen_keys(found: Sequences, request: int, row: int, top_k: int) -> list[int]:
    """Positions of the best keys of one new row, by a plain sort in float64."""
    keys = found.index_key[request]
    position = len(keys) - len(found.weights[request]) + row
    products = keys[: position + 1] @ found.index_query[request][row].T  # [L, Hi]
    scores = products.clamp(min=0) @ found.weights[request][row]
    order = sorted(range(position + 1), key=lambda t: (-scores[t].item(), t))
    return sorted(order[:top_k])


def dense(found: Sequences, request: int, row: int, keys: Sequence[int]) -> torch.Tensor:
    """`[H, Dv]`: one row over the given keys, by per-head keys and values."""
    latent, rope = found.latent[request][list(keys)].split([LATENT, ROPE], dim=-1)
    key = torch.einsum("tl,hdl->htd", latent, found.key_up)
    scores = torch.einsum("hd,htd->ht", found.query_nope[request][row], key)
    scores = scores + torch.einsum("hd,td->ht", found.query_rope[request][row], rope)
    value = torch.einsum("tl,hlv->htv", latent, found.value_up)
    return torch.einsum("ht,htv->hv", torch.softmax(scores * SCALE, dim=-1), value)


@dataclass(frozen=True)
class RankResult:
    """What one rank made of the step."""

    rows: list[tuple[int, int, int]]
    """Valid local rows: (place in `out`, request, new row of the request)."""
    out: torch.Tensor
    """`[M, h, Dv]`."""
    heads: tuple[int, int]
    """Heads of this rank: the first lanes."""
    chosen: dict[tuple[int, int], list[int]]
    """(request, new row) -> chosen positions, for every gathered row."""
    num_calls: int


def run_ranks(
    topology: Topology, batch: GlobalBatch, found: Sequences, backend: str = "reference"
) -> list[RankResult]:
    """Run one sparse layer on thread ranks, every call held against the schedule."""
    step_plan = plan(batch, topology)

    def body(world: World) -> RankResult:
        guard = ScheduleGuard()
        groups = form_groups(topology, world, guard)
        step = localize(step_plan, topology, world.global_rank)
        store = filled_store(topology, batch, found, step.dcp_rank)
        resources = AttentionResources(
            topology, store, groups, create_backend(backend), step.tp_rank
        )
        kind = local_kind(topology, step, found)
        calls = list(sparse_calls(step_plan, topology, ExchangeSizes.of(topology, step.tp_rank)))
        guard.begin(calls)
        if topology.mesh.pcp_size > 1 and step.num_distributed > 0:
            groups.pcp.all_gather(kind.rows[step.num_copy :].contiguous())  # the store is full
        classes = create_sparse_rows(step, resources)
        chosen: dict[tuple[int, int], list[int]] = {}
        for rows in classes:
            spy(rows, batch, chosen)
        out = torch.cat([rows.run(0, kind) for rows in classes])
        guard.finish()
        heads = topology.heads.query_range(step.tp_rank)
        return RankResult(local_rows(step), out, heads, chosen, len(calls))

    return ThreadGroup(topology.mesh.world_size).run(body)


def spy(rows: SparseRows, batch: GlobalBatch, chosen: dict[tuple[int, int], list[int]]) -> None:
    """Note what a class of rows chooses; a table names the request of each located sequence."""
    select = rows.choice.select

    def noting(layer, kind, own):  # type: ignore[no-untyped-def]
        selection = select(layer, kind, own)
        for sequence in rows.choice.sequences:
            tables = [request.block_tables[0] for request in batch.requests]
            request = tables.index(tuple(sequence.block_table.tolist()))
            cached = batch.requests[request].num_computed_tokens
            for row, position in zip(sequence.rows, sequence.positions.tolist(), strict=True):
                ids = [t for t in selection.ids[row].tolist() if t >= 0]
                chosen[request, position - cached] = sorted(ids)
        return selection

    rows.choice.select = noting  # type: ignore[method-assign]


def filled_store(topology: Topology, batch: GlobalBatch, found: Sequences, place: int) -> KVStore:
    """All rows, cached and new, where the placement formula says; all else is NaN."""
    ranks, run, block = topology.mesh.dcp_size, topology.interleave_size, topology.block_size
    blocks = 1 + max(block for request in batch.requests for block in request.block_tables[0])
    store = KVStore(
        tensor_of_layer={0: 0},
        num_blocks=blocks,
        block_size=block,
        num_heads=1,
        codec=PlainRows(LATENT + ROPE + INDEX_WIDTH, found.latent[0].dtype),
        device=torch.device("cpu"),
    )
    store.layer(0).fill_(torch.nan)
    for request, latent, key in zip(batch.requests, found.latent, found.index_key, strict=True):
        for t in range(len(latent)):
            if (t // run + request.start_rank) % ranks == place:
                index = t // (ranks * run) * run + t % run
                slot = request.block_tables[0][index // block] * block + index % block
                store.layer(0)[slot, 0] = torch.cat([latent[t], key[t]])
    return store


def local_rows(step: RankStep) -> list[tuple[int, int, int]]:
    """(local row, request, new row) of the rows of a rank, pads left out."""
    layout, count = step.plan.rows, step.num_local_rows
    valid = layout.valid[step.pcp_rank * count : (step.pcp_rank + 1) * count]
    return [
        (
            place,
            int(step.rows.request[row]),
            int(row - layout.request_starts[step.rows.request[row]]),
        )
        for place, row in enumerate(layout.local_rows(step.pcp_rank).tolist())
        if valid[place]
    ]


def local_kind(topology: Topology, step: RankStep, found: Sequences) -> SparseLatentKind:
    """This rank's lanes and rows; pads hold NaN, which must not matter."""
    first, last = topology.heads.query_range(step.tp_rank)
    lanes, count = topology.heads.lanes, step.num_local_rows
    dtype = found.latent[0].dtype

    def spread(source: list[torch.Tensor], is_stored: bool, heads: slice | None) -> torch.Tensor:
        shape = source[0].shape[1:] if heads is None else (lanes, *source[0].shape[2:])
        out = torch.full((count, *shape), torch.nan, dtype=dtype)
        for place, request, row in local_rows(step):
            skipped = len(source[request]) - len(found.weights[request]) if is_stored else 0
            value = source[request][skipped + row]
            if heads is None:
                out[place] = value
            else:
                out[place, : last - first] = value[heads]
        return out

    def lanes_of(matrix: torch.Tensor) -> torch.Tensor:
        out = torch.zeros((lanes, *matrix.shape[1:]), dtype=dtype)
        out[: last - first] = matrix[first:last]
        return out

    own = slice(first, last)
    index = IndexRows(
        spread(found.index_query, False, None),
        spread(found.index_key, True, None),
        spread(found.weights, False, None),
    )
    return SparseLatentKind(
        spread(found.query_nope, False, own),
        spread(found.query_rope, False, own),
        spread(found.latent, True, None),
        lanes_of(found.key_up),
        lanes_of(found.value_up),
        SCALE,
        index,
    )
