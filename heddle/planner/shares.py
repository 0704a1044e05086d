"""Which ranks hold equally large shares of a model: one of each kind is weighed.

A cut gives its parts one of two sizes, and rank 0 of a sum keeps the biases, so a plane of many
ranks has few kinds of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from heddle.layout.cut import cut
from heddle.step.topology import Topology


def distinct_shares(topology: Topology, stage: int) -> list[int]:
    """The first rank of each kind in a pipeline stage of the first replica.

    Args:
        topology: of the engine.
        stage: index of the stage.
    """
    mesh = topology.mesh
    first = stage * mesh.pcp_size * mesh.tp_size
    experts = _expert_counts(topology)
    # Without dealt experts, ranks differ by their place in the TP group alone.
    num_ranks = mesh.pcp_size * mesh.tp_size if experts else mesh.tp_size
    by_tp = [tuple(_sizes(topology, tp_rank)) for tp_rank in range(mesh.tp_size)]
    found: dict[tuple[object, ...], int] = {}
    for rank in range(first, first + num_ranks):
        kind = (by_tp[mesh.coord_of(rank).tp], experts.get(rank))
        found.setdefault(kind, rank)
    return list(found.values())


def _expert_counts(topology: Topology) -> dict[int, int]:
    """By rank, how many whole experts it holds; empty where none are dealt out."""
    moe = topology.model.moe
    if moe is None or not topology.has_expert_parallel:
        return {}
    return {
        rank: _size(cut(moe.num_experts, len(group), place))
        for group in topology.mesh.groups("ep")
        for place, rank in enumerate(group)
    }


def _sizes(topology: Topology, tp_rank: int) -> Iterator[int]:
    """Counts on which the bytes of a rank depend, dealt experts aside."""
    mesh, model, moe = topology.mesh, topology.model, topology.model.moe
    yield int(tp_rank == 0)
    yield _size(topology.heads.query_range(tp_rank))
    yield topology.heads.num_stored_kv_heads(mesh.slice_of(tp_rank))
    widths = [model.vocab_size, model.intermediate_size]
    if moe is not None:
        widths += [moe.expert_intermediate_size, moe.shared_width]
    for width in widths:
        yield _size(cut(width, mesh.tp_size, tp_rank))
    if topology.recurrent_layout is not None:
        yield _size(topology.recurrent_layout.head_range(tp_rank))
        yield _size(topology.recurrent_layout.key_range(tp_rank))


def _size(span: tuple[int, int]) -> int:
    return span[1] - span[0]
