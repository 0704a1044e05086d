"""What `heddle show` says of a layout, as data and as tables.

Everything is asked of the layout functions that the engine itself uses. Ownership repeats, so runs
are listed for one period: a million tokens are still one page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from heddle.cli.layout_object import degrees_text, layout_object
from heddle.cli.output import Cell, Table
from heddle.config import ParallelConfig
from heddle.layout.heads import HeadLayout
from heddle.layout.kv import KVLayout
from heddle.layout.mesh import PLANE_KINDS, GroupKind, Mesh
from heddle.layout.rows import RowRequest, classify, create_row_layout


def describe(
    parallel: ParallelConfig,
    *,
    block_size: int,
    executor: str,
    heads: tuple[int, int] | None,
    seq_lens: Sequence[int],
) -> dict[str, Any]:
    """The document of a legal layout.

    Args:
        parallel: degrees and exchanges; legal.
        block_size: tokens of a page on one rank.
        executor: as asked for.
        heads: (query, kv) head counts; None leaves heads out.
        seq_lens: lengths; each is one fresh prompt of the step whose rows are listed.
    """
    mesh = Mesh(
        tp_size=parallel.tensor_parallel_size,
        pcp_size=parallel.prefill_context_parallel_size,
        dcp_size=parallel.decode_context_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        dp_size=parallel.data_parallel_size,
    )
    kv_layout = KVLayout(mesh.dcp_size, parallel.kv_interleave_size, block_size)
    return {
        "legal": True,
        "world_size": mesh.world_size,
        "layout": layout_object(parallel, block_size=block_size, executor=executor),
        "lanes": parallel.cp_lanes,
        "rotation": parallel.cp_start_rank_rotation,
        "groups": {
            kind: [list(group) for group in mesh.groups(kind)] for kind in _kinds(mesh, parallel)
        },
        "heads": None if heads is None else _heads(mesh, *heads),
        "kv": _kv(kv_layout, seq_lens),
        "rows": _rows(mesh, seq_lens),
    }


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


def tables(document: dict[str, Any]) -> list[Table]:
    """The same facts for people."""
    return [ranks_table(document), *storage_tables(document)]


def storage_tables(document: dict[str, Any]) -> list[Table]:
    """Who stores which token, a table for each length; a place owns one run of each period."""
    return [_storage_table(sequence) for sequence in document["kv"]["sequences"]]


def _storage_table(sequence: dict[str, Any]) -> Table:
    runs = {run["owner"]: f"[{run['start']},{run['end']})" for run in sequence["runs"]}
    rows: list[list[Cell]] = [
        [place, count, runs.get(place, "-")] for place, count in enumerate(sequence["local_lens"])
    ]
    if len(rows) == 1:
        rows = [[0, sequence["seq_len"], "all of it"]]
    return Table(
        title=f"stored KV of {sequence['seq_len']} tokens, by place in a DCP group",
        columns=["place", "tokens", f"its run of every {sequence['period']} tokens"],
        rows=rows,
    )


def ranks_table(document: dict[str, Any]) -> Table:
    """Place of every rank in its groups, its heads and its rows."""
    places = [_places(groups) for groups in document["groups"].values()]
    rows: list[list[Cell]] = []
    for rank in range(document["world_size"]):
        segments = document["rows"][rank]["segments"]
        computes = " ".join(f"{s['request']}:[{s['start']},{s['end']})" for s in segments)
        rows.append(
            [
                rank,
                *(place[rank] for place in places),
                *_head_cells(document["heads"], rank),
                computes,
            ]
        )
    head_columns = ["queries", "kv heads"] if document["heads"] else []
    layout = document["layout"]
    return Table(
        title=f"{degrees_text(layout)}: "
        f"{document['world_size']} ranks, a virtual block is "
        f"{document['kv']['virtual_block_size']} tokens",
        columns=["rank", *document["groups"], *head_columns, "prompt:[rows) if cut"],
        rows=rows,
    )


def _places(groups: list[list[int]]) -> dict[int, str]:
    """`group.place` of every rank among the groups of one kind."""
    return {
        rank: f"{number}.{place}"
        for number, group in enumerate(groups)
        for place, rank in enumerate(group)
    }


def _head_cells(described: list[dict[str, Any]] | None, rank: int) -> list[str]:
    if described is None:
        return []
    start, end = described[rank]["query"]
    return [f"[{start},{end})", " ".join(map(str, described[rank]["kv"]))]


def notes(parallel: ParallelConfig) -> list[str]:
    """What a reader of the numbers should know: what they leave out, and what does nothing here."""
    interleave, found = parallel.kv_interleave_size, []
    if parallel.decode_context_parallel_size == 1 and interleave > 1:
        found.append(
            f"an interleave of {interleave} has no effect: with dcp 1 every token has one store"
        )
    if parallel.cp_start_rank_rotation:
        found.append(
            "rotation: a block chain starts on the place that stores least; the owners above are "
            "those of a chain that starts at 0"
        )
    if parallel.cp_lanes is not None:
        found.append(f"lanes: partial results merge in {parallel.cp_lanes} lanes for every dcp")
    if parallel.data_parallel_size > 1:
        found.append("each replica serves its own requests; those above are of any one of them")
    return found
