"""How a model lies over a layout: stages, experts, cache groups, recurrent layers; as data."""

from __future__ import annotations

from typing import Any

from heddle.layout.cache_groups import CacheGroup
from heddle.layout.cache_rows import row_format
from heddle.layout.cut import cut
from heddle.layout.mesh import Mesh
from heddle.step.topology import Topology

STATE_SLOTS_PER_SEQUENCE = 1
"""One more for each draft, where drafts are on."""


def outline(topology: Topology, *, is_known: bool) -> dict[str, Any]:
    """The parts of the document that depend on layers.

    Args:
        topology: of the model and the layout.
        is_known: False: the model is an assumed one, and nothing is said of its layers.
    """
    return {
        "stages": stages(topology, is_known=is_known),
        "experts": experts(topology),
        "cache_groups": [cache_group(topology, group) for group in topology.groups]
        if is_known
        else None,
        "recurrent": recurrent(topology) if is_known else None,
    }


def stages(topology: Topology, *, is_known: bool) -> list[dict[str, Any]]:
    """Layers [start, end) and ranks of every pipeline stage."""
    mesh = topology.mesh
    found = []
    for stage in range(mesh.pp_size):
        layers = topology.layers_of_stage(stage)
        found.append(
            {
                "stage": stage,
                "layers": [layers.start, layers.stop] if is_known else None,
                "ranks": [r for r in range(mesh.world_size) if mesh.coord_of(r).pp == stage],
            }
        )
    return found


def experts(topology: Topology) -> dict[str, Any] | None:
    """Experts [start, end) of every rank; None unless whole experts are dealt out.

    The experts of a layer are cut over the ranks of an EP group, in the order of the group.
    """
    moe = topology.model.moe
    if not topology.has_expert_parallel or moe is None:
        return None
    mesh, count = topology.mesh, moe.num_experts
    return {
        "num_experts": count,
        "per_rank": [
            {"rank": rank, "experts": _share(mesh, rank, count)} for rank in range(mesh.world_size)
        ],
    }


def _share(mesh: Mesh, rank: int, count: int) -> list[int]:
    place, size = mesh.position("ep", rank), mesh.group_size("ep")
    return list(cut(count, size, place))


def cache_group(topology: Topology, group: CacheGroup) -> dict[str, Any]:
    """One cache group; `window` is None under full attention, bytes are those of a token on the
    rank that stores most heads of it, all stages together.
    """
    row_bytes = row_format(topology.model, topology.kv_cache_dtype).row_bytes
    rule = group.visibility
    return {
        "rule": rule.kind,
        "window": None if rule.is_full else rule.size,
        "first_tokens": rule.num_first,
        "layers": list(group.layers),
        "ranks_sharing": group.world_size,
        "block_tokens": group.world_size * topology.block_size,
        "token_bytes": len(group.layers) * topology.heads.max_stored_kv_heads * row_bytes,
    }


def recurrent(topology: Topology) -> dict[str, Any] | None:
    """Layers that keep a state; None where there are none."""
    layers = topology.recurrent_layers(range(topology.model.num_layers))
    if not layers:
        return None
    return {"layers": list(layers), "state_slots_per_sequence": STATE_SLOTS_PER_SEQUENCE}
