"""`heddle doctor --dump FILE`: what ranks did last before an engine failed, for people.

Four questions in order: where did each rank stand, what were its last calls, who waits for whom,
and where do the ranks' lists of calls part first.
"""

from __future__ import annotations

from typing import Any

import msgspec

from heddle.cli.output import Cell, Table
from heddle.faults.dump import Dump
from heddle.faults.page import Call
from heddle.faults.standing import first_difference, laggard, waits, where

LAST_CALLS = 8
"""Of each rank, in the tables; the document has all that were kept."""


def document(dump: Dump) -> dict[str, Any]:
    """The dump, with what follows from it."""
    found: dict[str, Any] = msgspec.to_builtins(dump)
    found["laggard"] = laggard(dump.ranks)
    found["waits"] = msgspec.to_builtins(waits(dump.ranks, dump.groups))
    found["first_difference"] = msgspec.to_builtins(first_difference(dump.ranks, dump.groups))
    return found


def tables(dump: Dump) -> list[Table]:
    """The same for people."""
    facts = [["written", dump.written], ["cause", dump.cause]]
    last = laggard(dump.ranks)
    if last is not None:
        facts.append(["all others are ahead of", dump.labels[last]])
    stood = [[dump.labels[standing.rank], where(standing)] for standing in dump.ranks]
    calls: list[list[Cell]] = [
        [dump.labels[standing.rank], call.step, call.number, _layer(call), call.words, _took(call)]
        for standing in dump.ranks
        for call in standing.calls[-LAST_CALLS:]
    ]
    waiting = [
        [dump.labels[wait.rank], wait.call.words, _ranks(dump, wait.missing)]
        for wait in waits(dump.ranks, dump.groups)
    ]
    return [
        Table(title="failure", columns=["what", "value"], rows=facts),
        Table(title="where the ranks stood", columns=["rank", "where"], rows=stood),
        Table(
            title=f"last {LAST_CALLS} calls of each rank",
            columns=["rank", "step", "number", "layer", "call", "milliseconds"],
            rows=calls,
        ),
        Table(
            title="who waits for whom",
            columns=["rank", "inside", "not there"],
            rows=waiting or [["nobody", "", ""]],
        ),
        _difference_table(dump),
    ]


def _difference_table(dump: Dump) -> Table:
    found = first_difference(dump.ranks, dump.groups)
    title = "first difference between the ranks' calls"
    if found is None:
        return Table(title=title, columns=["rank", "call"], rows=[["none", ""]])
    return Table(
        title=f"{title}: step {found.step}, call {found.place} over {found.group}",
        columns=["rank", "call"],
        rows=[
            [dump.labels[rank], "none" if call is None else call.words]
            for rank, call in zip(found.members, found.calls, strict=True)
        ],
    )


def _layer(call: Call) -> str:
    return "-" if call.layer < 0 else str(call.layer)


def _took(call: Call) -> str:
    return "not ended" if call.ended is None else f"{(call.ended - call.begun) * 1e3:.2f}"


def _ranks(dump: Dump, ranks: tuple[int, ...]) -> str:
    return ", ".join(dump.labels[rank] for rank in ranks) or "nobody: all have come"
