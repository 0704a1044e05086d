"""One step of a mixed batch, as the planner would do it: who computes what, and what it costs.

    fresh prompt    as long as asked for, or as much of it as one step holds
    later piece     of another prompt, so that cached context is met
    decode          one row, at the same context

Classes, owners, exchanges and reasons are those of the real plan; calls and bytes are read off the
descriptions that ranks obey, for rank 0 and one layer of each cache group.

Legend: `n` local rows of a class, pads included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from heddle.cli.show_topology import Shown
from heddle.layout.rows import RowClass, RowLayout
from heddle.planner.batches import Rows, create_batch
from heddle.step.exchanges import ExchangeSizes, describe, new_rows_gather
from heddle.step.experts import expert_calls
from heddle.step.norms import norm_sums
from heddle.step.plan import StepPlan, plan
from heddle.step.recurrent import recurrent_collectives
from heddle.step.sparse import sparse_calls
from heddle.step.topology import Topology
from heddle.step.traffic import Collective, cost_of

CONTEXT = 96
"""Cached tokens of the later piece and of the decode."""
PIECE = 64
"""Rows of the later piece."""


def sketch_step(shown: Shown, seq_len: int) -> dict[str, Any]:
    """The step as data.

    Args:
        shown: topology and limits.
        seq_len: tokens of the fresh prompt; 0 leaves it out.
    """
    topology = shown.topology
    fresh = min(seq_len, shown.max_num_batched_tokens - PIECE - 1)
    is_whole = fresh == seq_len
    requests = [("fresh prompt" if is_whole else "start of a prompt", 0, fresh)] if fresh else []
    requests += [("later piece", CONTEXT, PIECE), ("decode", CONTEXT, 1)]
    parts = [Rows(cached, new) for _, cached, new in requests]
    found = plan(create_batch(topology, parts), topology)
    return {
        "requests": [
            {
                "request": index,
                "what": what,
                "new_rows": rows,
                "cached": cached,
                "row_class": found.classes[index].value,
                "owner": _owner(found.rows, index),
            }
            for index, (what, cached, rows) in enumerate(requests)
        ],
        "cache_groups": [_group(found, topology, group) for group in range(len(topology.groups))],
        "recurrent": _recurrent(found, topology),
        "experts": _experts(found, topology),
        "costs": dataclasses.asdict(topology.costs),
        "reasons": [*found.reasons, shown.costs_reason],
    }


def _owner(rows: RowLayout, request: int) -> int | None:
    """PCP rank of a request that one rank computes; None where all do."""
    if rows.classes[request] is not RowClass.WHOLE:
        return None
    holders = (
        rank
        for rank in range(rows.pcp_size)
        if any(segment.request == request for segment in rows.segments(rank))
    )
    return next(holders)


def _group(found: StepPlan, topology: Topology, group: int) -> dict[str, Any]:
    """Exchanges of one cache group, class by class, and what its layers send in all."""
    sizes, part, rows = ExchangeSizes.of(topology, tp_rank=0), found.groups[group], found.rows
    new_rows = list(new_rows_gather(part.new_rows, rows.num_distributed, sizes, part.halo_rows))
    classes: list[dict[str, Any]] = []
    calls = [*norm_sums(rows, topology), *new_rows]
    for row_class, choice in part.classes.items():
        start, end = rows.class_rows(row_class)
        sent = list(describe(choice, end - start, sizes))
        calls += sent
        if end > start:
            exchange = {"context": choice.context, "returns": choice.returns}
            classes.append({"row_class": row_class.value, "rows": end - start, **exchange})
            classes[-1] |= _cost(sent, topology)
    if topology.model.sparse is not None:
        calls = list(sparse_calls(found, topology, sizes))
        # What one class costs is not told apart.
        classes = [{**row, "calls": None, "bytes": None} for row in classes]
    return {
        "group": group,
        "new_rows": {"way": part.new_rows, **_cost(new_rows, topology)},
        "classes": classes,
        **_cost(calls, topology),
    }


def _recurrent(found: StepPlan, topology: Topology) -> dict[str, int] | None:
    layout = topology.recurrent_layout
    if layout is None:
        return None
    calls = recurrent_collectives(found.rows, layout, 0, topology.dtype)
    return _cost((Collective(*call) for call in calls), topology)


def _experts(found: StepPlan, topology: Topology) -> dict[str, int] | None:
    """Calls of a mixture whose experts are dealt out; how many rows travel the router decides."""
    calls = list(expert_calls(found.rows, topology))
    return {"calls": len(calls)} if calls else None


def _cost(calls: Iterable[Collective], topology: Topology) -> dict[str, int]:
    cost = cost_of(calls, topology.mesh)
    return {"calls": cost.calls, "bytes": cost.received_bytes}
