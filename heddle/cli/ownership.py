"""What `heddle show` says of a layout, as data and as tables.

Everything is asked of the layout functions that the engine itself uses. Ownership repeats, so runs
are listed for one period: a million tokens are still one page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from heddle.cli.layout_object import layout_object
from heddle.cli.output import Cell, Table
from heddle.config import ParallelConfig
from heddle.layout.heads import HeadLayout
from heddle.layout.kv import KVLayout
from heddle.layout.mesh import GROUP_KINDS, Mesh
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
    )
    kv_layout = KVLayout(mesh.dcp_size, parallel.kv_interleave_size, block_size)
    return {
        "legal": True,
        "world_size": mesh.world_size,
        "layout": layout_object(parallel, block_size=block_size, executor=executor),
        "groups": {kind: [list(group) for group in mesh.groups(kind)] for kind in GROUP_KINDS},
        "heads": None if heads is None else _heads(mesh, *heads),
        "kv": _kv(kv_layout, seq_lens),
        "rows": _rows(mesh, seq_lens),
    }


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
            "segments": [segment._asdict() for segment in layout.segments(mesh.coord_of(rank).pcp)],
        }
        for rank in range(mesh.world_size)
    ]


def tables(document: dict[str, Any]) -> list[Table]:
    """The same facts for people."""
    kv = document["kv"]
    found = [_ranks_table(document)]
    for sequence in kv["sequences"]:
        runs = sequence["runs"]
        found.append(
            Table(
                title=f"stored KV of {sequence['seq_len']} tokens, by place in the DCP group: "
                f"{_first_runs(runs)}, repeating every {sequence['period']}",
                columns=["place", "tokens"],
                rows=list(enumerate(sequence["local_lens"])),
            )
        )
    return found


def _first_runs(runs: list[dict[str, int]], limit: int = 8) -> str:
    shown = [f"[{run['start']},{run['end']})->{run['owner']}" for run in runs[:limit]]
    return " ".join(shown) + (" ..." if len(runs) > limit else "")


def _ranks_table(document: dict[str, Any]) -> Table:
    places = [_places(document["groups"][kind]) for kind in GROUP_KINDS]
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
    head_columns = ["query heads", "kv heads"] if document["heads"] else []
    layout = document["layout"]
    return Table(
        title=f"tp {layout['tp']} pcp {layout['pcp']} dcp {layout['dcp']}: "
        f"{document['world_size']} ranks, a virtual block is "
        f"{document['kv']['virtual_block_size']} tokens",
        columns=["rank", *GROUP_KINDS, *head_columns, "computes request:[rows)"],
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
    """What a reader of the numbers should know: settings that are legal but do nothing here."""
    if parallel.decode_context_parallel_size == 1 and parallel.kv_interleave_size > 1:
        interleave = parallel.kv_interleave_size
        return [
            f"an interleave of {interleave} has no effect: with dcp 1 every token has one store"
        ]
    return []
