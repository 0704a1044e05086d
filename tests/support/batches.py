"""Small global batches and topologies, drawn by hypothesis or made by hand."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from heddle.config import ModelConfig, RopeConfig
from heddle.layout.heads import HeadLayout
from heddle.layout.mesh import Mesh
from heddle.step.batch import GlobalBatch, ScheduledRequest
from heddle.step.topology import Topology

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


def make_model(num_query_heads: int = 12, num_kv_heads: int = 4) -> ModelConfig:
    """A model config of which only shapes matter."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=100,
        hidden_size=96,
        intermediate_size=128,
        num_layers=2,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        max_position_embeddings=1 << 20,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        tie_word_embeddings=True,
    )


def make_topology(
    sizes: tuple[int, int, int],
    *,
    interleave: int = 1,
    block_size: int = 4,
    workspace: int = 64,
    copy_exchange: str = "ag_rs",
    context_exchange: str = "gather_kv",
    merge_exchange: str = "ag_rs",
) -> Topology:
    """A topology by hand; exchanges fall back to `local` at dcp 1."""
    tp, pcp, dcp = sizes
    mesh = Mesh(tp_size=tp, pcp_size=pcp, dcp_size=dcp)
    model = make_model()
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
        copy_exchange=copy_exchange if dcp > 1 else "local",
        context_exchange=context_exchange if dcp > 1 else "local",
        merge_exchange=merge_exchange,
        context_workspace_tokens=workspace,
    )


def make_batch(
    topology: Topology, lengths: Sequence[tuple[int, int]], step: int = 0
) -> GlobalBatch:
    """A batch of (cached, new) requests with disjoint, scattered block tables."""
    virtual = topology.kv_layout().virtual_block_size
    requests = []
    next_block = 1
    for index, (cached, new) in enumerate(lengths):
        count = -(-(cached + new) // virtual)
        table = tuple(reversed(range(next_block, next_block + count)))
        next_block += count + 1
        requests.append(
            ScheduledRequest(
                request_id=100 + index,
                token_ids=tuple((7 * index + i) % 100 for i in range(new)),
                num_computed_tokens=cached,
                block_table=table,
                layout_fingerprint=topology.fingerprint(),
            )
        )
    return GlobalBatch(epoch=0, step=step, requests=tuple(requests))


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Any relation of the axes, with an interleave that divides the block size."""
    block_size = draw(st.sampled_from([1, 2, 4, 6]))
    divisors = [i for i in range(1, block_size + 1) if block_size % i == 0]
    return make_topology(
        draw(st.sampled_from(LAYOUTS)),
        interleave=draw(st.sampled_from(divisors)),
        block_size=block_size,
        workspace=draw(st.sampled_from([1, 7, 16, 200])),
        context_exchange=draw(st.sampled_from(["gather_kv", "gather_q"])),
        copy_exchange=draw(st.sampled_from(["ag_rs", "ag_ar", "a2a"])),
        merge_exchange=draw(st.sampled_from(["ag_rs", "ag_ar", "a2a"])),
    )


request_lengths = st.lists(
    st.tuples(st.sampled_from([0, 1, 2, 3, 5, 8, 13, 37]), st.sampled_from([1, 1, 2, 3, 5, 9, 24])),
    min_size=1,
    max_size=5,
)
"""(cached, new) tokens of each request: decodes, tiny prompts, chunks, with and without context."""
