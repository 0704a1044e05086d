"""Who is with whom, who stores which token, who computes which row: a layout as data.

Everything is asked of the layout functions that the engine itself uses. Ownership repeats, so runs
are listed for one period: a million tokens are still one page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from heddle.config import ParallelConfig
from heddle.layout.heads import HeadLayout
from heddle.layout.kv import KVLayout
from heddle.layout.mesh import PLANE_KINDS, GroupKind, Mesh
from heddle.layout.rows import RowRequest, classify, create_row_layout


def describe(
    parallel: ParallelConfig,
    *,
    layout: Mapping[str, Any],
    heads: tuple[int, int] | None,
    seq_lens: Sequence[int],
) -> dict[str, Any]:
    """The document of a legal layout.

    Args:
        parallel: degrees and exchanges; legal.
        layout: the same as the object that all commands print.
        heads: (query, kv) head counts; None leaves heads out.
        seq_lens: lengths; each is one fresh prompt of the step whose rows are listed.
    """
    mesh = Mesh.of(parallel)
    kv_layout = KVLayout(mesh.dcp_size, parallel.kv_interleave_size, layout["block_size"])
    return {
        "legal": True,
        "world_size": mesh.world_size,
        "layout": dict(layout),
        "lanes": parallel.cp_lanes,
        "rotation": parallel.cp_start_rank_rotation,
        "groups": {
            kind: [list(group) for group in mesh.groups(kind)] for kind in _kinds(mesh, parallel)
        },
        "heads": None if heads is None else _heads(mesh, *heads),
        "kv": _kv(kv_layout, seq_lens),
        "rows": _rows(mesh, seq_lens),
    }


def places(parallel: ParallelConfig) -> list[dict[str, int]]:
    """By rank, where it is: {dp, pp, pcp, tp}."""
    mesh = Mesh.of(parallel)
    coords = [mesh.coord_of(rank) for rank in range(mesh.world_size)]
    return [{"dp": at.dp, "pp": at.pp, "pcp": at.pcp, "tp": at.tp} for at in coords]


def _kinds(mesh: Mesh, parallel: ParallelConfig) -> list[GroupKind]:
    """Kinds of groups that are worth a column; those outside a plane only where they join ranks."""
    has_experts = parallel.enable_expert_parallel and mesh.group_size("ep") > 1
    kinds = list(PLANE_KINDS)
    kinds += ["pp"] if mesh.pp_size > 1 else []
    return [*kinds, "ep"] if has_experts else kinds


def _heads(mesh: Mesh, num_query_heads: int, num_kv_heads: int) -> list[dict[str, Any]]:
    layout = HeadLayout(
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        tp_size=mesh.tp_size,
        slice_size=mesh.slice_size,
    )
    described = []
    for rank in range(mesh.world_size):
        tp_rank = mesh.coord_of(rank).tp
        query = layout.query_range(tp_rank)
        stored = range(*layout.kv_range(mesh.slice_of(tp_rank)))
        described.append({"rank": rank, "query": list(query), "kv": list(stored)})
    return described


def _kv(layout: KVLayout, seq_lens: Sequence[int]) -> dict[str, Any]:
    return {
        "block_size": layout.block_size,
        "interleave": layout.interleave_size,
        "virtual_block_size": layout.virtual_block_size,
        "sequences": [_sequence(layout, seq_len) for seq_len in seq_lens],
    }


def _sequence(layout: KVLayout, seq_len: int) -> dict[str, Any]:
    starts = range(0, min(seq_len, layout.round_size), layout.interleave_size)
    return {
        "seq_len": seq_len,
        "period": layout.round_size,
        "runs": [
            {
                "start": start,
                "end": min(start + layout.interleave_size, seq_len),
                "owner": layout.owner(start),
            }
            for start in starts
        ],
        "local_lens": [layout.local_len(seq_len, rank) for rank in range(layout.world_size)],
    }


def _rows(mesh: Mesh, seq_lens: Sequence[int]) -> list[dict[str, Any]]:
    requests = [RowRequest(length, classify(length, mesh.pcp_size)) for length in seq_lens]
    layout = create_row_layout(requests, mesh.pcp_size)
    return [
        {
            "rank": rank,
            "segments": [
                {"request": part.request, "start": part.start, "end": part.end}
                for part in layout.segments(mesh.coord_of(rank).pcp)
            ],
        }
        for rank in range(mesh.world_size)
    ]
