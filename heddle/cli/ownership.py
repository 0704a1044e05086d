"""What `heddle show` says of a layout, as tables; the same as data: `heddle.view.ownership`."""

from __future__ import annotations

from typing import Any

from heddle.cli.output import Cell, Table
from heddle.config import ParallelConfig
from heddle.layout.layout_object import degrees_text


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
