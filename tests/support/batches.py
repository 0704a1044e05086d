"""Small global batches and topologies, drawn by hypothesis or made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from heddle.config import ModelConfig, RopeConfig
from heddle.config.model import LayerKind
from heddle.config.visibility import FULL, Visibility
from heddle.layout.heads import HeadLayout
from heddle.layout.mesh import Mesh
from heddle.layout.rows import RowClass, RowRequest, classify
from heddle.step.batch import GlobalBatch, ScheduledRequest
from heddle.step.packed import pack_table
from heddle.step.placement import Placed, place_rows
from heddle.step.topology import RowPolicy, Topology

LAYOUTS = (
    (1, 1, 1),
    (2, 1, 1),
    (2, 1, 2),
    (1, 2, 1),
    (1, 2, 2),
    (2, 2, 2),
    (2, 2, 4),
    (1, 4, 2),
    (4, 1, 2),
    (1, 3, 3),
    (3, 2, 6),
    (5, 1, 5),
)
"""(tp, pcp, dcp), every relation between the three."""

CONTEXTS = ("gather_kv", "ring_kv", "gather_q", "pass_q")
RETURNS = ("ag_rs", "ag_ar", "a2a", "a2a_fine")

RULES = (
    FULL,
    Visibility("window", 1),
    Visibility("window", 5),
    Visibility("window", 16),
    Visibility("window", 6, num_first=3),
    Visibility("window", 20, num_first=9),
    Visibility("chunk", 4),
    Visibility("chunk", 10),
)
"""Visible keys; windows around rounds and blocks of the layouts, and below them."""


def whole_in_turn(requests: Sequence[ScheduledRequest], topology: Topology) -> Placed:
    """Every class by turns: WHOLE requests wander over the PCP ranks."""
    classes = (RowClass.WHOLE, RowClass.SPLIT, RowClass.COPY)
    return Placed(
        tuple(
            RowRequest(
                len(request.token_ids), classes[index % 3], owner=index % topology.mesh.pcp_size
            )
            for index, request in enumerate(requests)
        ),
        (),
    )


def by_length(requests: Sequence[ScheduledRequest], topology: Topology) -> Placed:
    """Two rows per PCP rank and more are cut, fewer are copied: for literal expectations."""
    size = topology.mesh.pcp_size
    counts = [len(request.token_ids) for request in requests]
    return Placed(tuple(RowRequest(count, classify(count, size)) for count in counts), ())


def make_model(
    num_query_heads: int = 12, num_kv_heads: int = 4, rule: Visibility = FULL, **fields: Any
) -> ModelConfig:
    """A model config of which only shapes matter; every layer sees keys by `rule`."""
    fields.setdefault("num_layers", 2)
    fields.setdefault("layer_kinds", (LayerKind(visibility=rule),) * fields["num_layers"])
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=100,
        hidden_size=96,
        intermediate_size=128,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        max_position_embeddings=1 << 20,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        tie_word_embeddings=True,
        **fields,
    )


def make_topology(
    sizes: tuple[int, int, int],
    *,
    interleave: int = 1,
    block_size: int = 4,
    workspace: int = 64,
    return_exchange: str = "ag_rs",
    context_exchange: str = "gather_kv",
    rule: Visibility = FULL,
    row_policy: RowPolicy = place_rows,
    lanes: int | None = None,
    replicates_queries: bool = False,
    **fields: Any,
) -> Topology:
    """A topology by hand; `fields` are those of `ModelConfig`."""
    tp, pcp, dcp = sizes
    mesh = Mesh(tp_size=tp, pcp_size=pcp, dcp_size=dcp)
    model = make_model(rule=rule, **fields)
    return Topology(
        mesh=mesh,
        heads=HeadLayout(
            num_query_heads=model.num_query_heads,
            num_kv_heads=model.num_kv_heads,
            tp_size=tp,
            slice_size=mesh.slice_size,
        ),
        model=model,
        interleave_size=interleave,
        block_size=block_size,
        dtype="float32",
        kv_cache_dtype="float32",
        return_exchange=return_exchange,
        context_exchange=context_exchange,
        context_workspace_tokens=workspace,
        row_policy=row_policy,
        lanes=lanes,
        replicates_queries=replicates_queries,
    )


def make_batch(
    topology: Topology, lengths: Sequence[tuple[int, int]], step: int = 0
) -> GlobalBatch:
    """A batch of (cached, new) requests with disjoint, scattered block tables.

    Blocks that no new row sees are 0, as the accounting leaves them.
    """
    requests = []
    next_block = 1
    for index, (cached, new) in enumerate(lengths):
        tables = []
        for number, group in enumerate(topology.groups):
            virtual = topology.kv_layout(number).virtual_block_size
            count = -(-(cached + new) // virtual)
            table = list(reversed(range(next_block, next_block + count)))
            next_block += count + 1
            rule = group.visibility
            unseen = range(-(-rule.num_first // virtual), rule.needed_from(cached) // virtual)
            for block in unseen:
                table[block] = 0
            tables.append(tuple(table))
        requests.append(
            ScheduledRequest(
                request_id=100 + index,
                token_ids=tuple((7 * index + i) % 100 for i in range(new)),
                num_computed_tokens=cached,
                packed_tables=tuple(map(pack_table, tables)),
                layout_fingerprint=topology.fingerprint(),
            )
        )
    return GlobalBatch(epoch=0, step=step, requests=tuple(requests))


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Any relation of the axes, with an interleave that divides the block size."""
    block_size = draw(st.sampled_from([1, 2, 4, 6]))
    divisors = [i for i in range(1, block_size + 1) if block_size % i == 0]
    sizes = draw(st.sampled_from(LAYOUTS))
    contexts, returns, lanes = list(CONTEXTS), list(RETURNS), None
    replicates_queries = sizes[2] > sizes[1] and draw(st.booleans())
    if replicates_queries:
        contexts.remove("pass_q")
    if draw(st.booleans()):
        contexts, returns = ["gather_kv", "gather_q"], ["auto", "a2a"]
        lanes = sizes[2] * draw(st.integers(1, 3))
    return make_topology(
        sizes,
        interleave=draw(st.sampled_from(divisors)),
        block_size=block_size,
        workspace=draw(st.sampled_from([1, 7, 16, 200])),
        context_exchange=draw(st.sampled_from(contexts)),
        return_exchange=draw(st.sampled_from(returns)),
        lanes=lanes,
        replicates_queries=replicates_queries,
        rule=draw(st.sampled_from(RULES)),
        row_policy=draw(st.sampled_from([place_rows, whole_in_turn])),
    )


request_lengths = st.lists(
    st.tuples(st.sampled_from([0, 1, 2, 3, 5, 8, 13, 37]), st.sampled_from([1, 1, 2, 3, 5, 9, 24])),
    min_size=1,
    max_size=5,
)
"""(cached, new) tokens of each request: decodes, tiny prompts, chunks, with and without context."""
