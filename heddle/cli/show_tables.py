"""The layers and the step of `heddle show` as tables: narrow, and alike rows joined."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from heddle.cli.output import Cell, Table

_WIDTH = 79
_MOST_RUNS = 4
"""Runs of layers or ranks that are listed; more are counted."""


def outline_tables(document: dict[str, Any]) -> list[Table]:
    """Stages, experts, cache groups and recurrent layers, where there is something to say."""
    found = []
    if len(document["stages"]) > 1:
        found.append(_stages(document["stages"]))
    if document["experts"] is not None:
        found.append(_experts(document["experts"]))
    if document["cache_groups"] is not None:
        found.append(_layers(document["cache_groups"], document["recurrent"]))
    return found


def _stages(stages: Sequence[dict[str, Any]]) -> Table:
    rows = [[row["stage"], _span(row["layers"]), runs_text(row["ranks"])] for row in stages]
    return Table(title="pipeline stages", columns=["stage", "layers", "ranks"], rows=rows)


def _experts(experts: dict[str, Any]) -> Table:
    by_span: dict[tuple[int, ...], list[int]] = {}
    for row in experts["per_rank"]:
        by_span.setdefault(tuple(row["experts"]), []).append(row["rank"])
    return Table(
        title=f"{experts['num_experts']} experts of each mixture layer",
        columns=["experts", "ranks"],
        rows=[[_span(span), runs_text(ranks)] for span, ranks in by_span.items()],
    )


def _layers(groups: Sequence[dict[str, Any]], recurrent: dict[str, Any] | None) -> Table:
    rows: list[list[Cell]] = [
        [
            index,
            runs_text(group["layers"]),
            rule_text(group),
            f"{group['ranks_sharing']} ranks, cut" if group["ranks_sharing"] > 1 else "each rank",
            group["block_tokens"],
            group["token_bytes"],
        ]
        for index, group in enumerate(groups)
    ]
    if recurrent is not None:
        slots = recurrent["state_slots_per_sequence"]
        state = f"all, in {slots} state slot a sequence"
        rows.append(["-", runs_text(recurrent["layers"]), state, "each rank", "-", "-"])
    columns = ["group", "layers", "a row sees", "kept on", "block", "bytes a token"]
    return Table(title="cache groups", columns=columns, rows=rows)


def rule_text(group: dict[str, Any]) -> str:
    """Which keys a row sees.

    Example:
        >>> rule_text({"rule": "window", "window": 128, "first_tokens": 4})
        'first 4, last 128'
    """
    if group["rule"] == "full":
        return "all before it"
    if group["rule"] == "chunk":
        return f"its chunk of {group['window']}"
    first = f"first {group['first_tokens']}, " if group["first_tokens"] else ""
    return f"{first}last {group['window']}"


def step_tables(document: dict[str, Any]) -> list[Table]:
    """Who computes each request, and what one layer of each group sends."""
    step = document["step"]
    return [_requests(step["requests"], document["layout"]["pcp"]), _traffic(step)]


def _requests(requests: Sequence[dict[str, Any]], pcp: int) -> Table:
    rows = [
        [
            row["request"],
            row["what"],
            row["new_rows"],
            row["cached"],
            row["row_class"],
            _owner_text(row, pcp),
        ]
        for row in requests
    ]
    columns = ["request", "what", "rows", "cached", "class", "computed by"]
    return Table(title="a mixed step", columns=columns, rows=rows)


def _owner_text(row: dict[str, Any], pcp: int) -> str:
    if pcp == 1:
        return "pcp rank 0"
    if row["owner"] is not None:
        return f"pcp rank {row['owner']}"
    return "every pcp rank" if row["row_class"] == "copy" else "all pcp ranks, in parts"


def _traffic(step: dict[str, Any]) -> Table:
    """One row per class and way, of cache groups that do alike together."""
    by_rows: dict[tuple[tuple[Cell, ...], ...], list[int]] = {}
    for group in step["cache_groups"]:
        by_rows.setdefault(tuple(_group_rows(group)), []).append(group["group"])
    rows: list[list[Cell]] = [
        [runs_text(groups) if place == 0 else "", *row]
        for found, groups in by_rows.items()
        for place, row in enumerate(found)
    ]
    if step["recurrent"] is not None:
        cost = step["recurrent"]
        rows.append(["-", "", "recurrent layers", "", cost["calls"], _count(cost["bytes"])])
    if step["experts"] is not None:
        rows.append(["-", "", "experts", "", step["experts"]["calls"], "as routed"])
    return Table(
        title="what rank 0 receives in one layer of each cache group",
        columns=["group", "rows", "context", "returns", "calls", "bytes"],
        rows=rows,
    )


def _group_rows(group: dict[str, Any]) -> Iterator[tuple[Cell, ...]]:
    new_rows = group["new_rows"]
    if new_rows["calls"]:
        yield (
            "new KV",
            new_rows["way"],
            "-",
            new_rows["calls"],
            _count(new_rows["bytes"]),
        )
    is_told_apart = all(row["calls"] is not None for row in group["classes"])
    for row in group["classes"]:
        calls, size = (row["calls"], _count(row["bytes"])) if is_told_apart else ("", "")
        name = f"{row['rows']} {row['row_class']}"
        yield name, row["context"], row["returns"], calls, size
    if not is_told_apart:
        yield "all of it", "", "", group["calls"], _count(group["bytes"])


def _count(number: int) -> str:
    return f"{number:,}"


def _span(span: Sequence[int] | None) -> str:
    """`[0, 4)` of a pair."""
    return "-" if span is None else f"[{span[0]},{span[1]})"


def runs_text(numbers: Sequence[int]) -> str:
    """Ascending numbers, runs joined; a regular or long list is still a few words.

    Example:
        >>> runs_text([0, 1, 2, 3, 7]), runs_text([0, 2, 4, 6, 8, 10])
        ('0-3 7', '0 2 .. 10')
        >>> runs_text([0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 16, 17, 18])
        '0-2 4-6 8-10 .. 16-18 (15)'
    """
    steps = {after - before for before, after in pairwise(numbers)}
    if len(numbers) > _MOST_RUNS and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]} {numbers[1]} .. {numbers[-1]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    if len(words) <= _MOST_RUNS:
        return " ".join(words)
    return f"{' '.join(words[: _MOST_RUNS - 1])} .. {words[-1]} ({len(numbers)})"


def wrapped(lines: Iterable[str]) -> Iterator[str]:
    """Sentences as a list, none wider than a terminal."""
    for line in lines:
        yield textwrap.fill(line, _WIDTH, initial_indent="- ", subsequent_indent="  ")
