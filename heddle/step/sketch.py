"""A plan in short words, so that two readings of one step can be laid side by side.

The driver sends a batch and the digest of its plan. A rank that derives another plan sends back
what it understood, name by name; the driver sketches its own plan and shows where they part. Hashes
stand for what is long: they tell that something differs, and the name tells where.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from heddle.step.batch import ScheduledRequest
from heddle.step.localize import GlobalRows, RankStep, localize
from heddle.step.plan import StepPlan
from heddle.step.schedule import collective_schedule
from heddle.step.slots import row_slots
from heddle.step.topology import Topology

MAX_DIFFERENCES = 20
"""Lines of a table for people; a damaged batch may differ everywhere."""
_MAX_BLOCKS = 8


def sketch_plan(plan: StepPlan, topology: Topology, global_rank: int) -> dict[str, str]:
    """What a plan comes to on one rank, by name.

    Args:
        plan: as it was derived.
        topology: constants of the engine.
        global_rank: the rank in question.
    """
    step = localize(plan, topology, global_rank)
    return {
        **_header(plan, topology),
        **dict(_requests(step, topology)),
        **{f"group {i} choices": _choices(plan, i) for i in range(len(plan.groups))},
        **_calls(plan, topology, global_rank),
    }


def side_by_side(ours: Mapping[str, str], theirs: Mapping[str, str], their_name: str) -> str:
    """A table of the names whose words differ; empty where none does.

    Args:
        ours: the driver's.
        theirs: of a rank.
        their_name: that rank.
    """
    names = [*ours, *(name for name in theirs if name not in ours)]
    rows = [
        (name, ours.get(name, "-"), theirs.get(name, "-"))
        for name in names
        if ours.get(name) != theirs.get(name)
    ]
    if not rows:
        return ""
    shown = [("what differs", "driver", their_name), *rows[:MAX_DIFFERENCES]]
    widths = [max(len(row[column]) for row in shown) for column in (0, 1)]
    lines = [f"{a:{widths[0]}}  {b:{widths[1]}}  {c}".rstrip() for a, b, c in shown]
    if len(rows) > MAX_DIFFERENCES:
        lines.append(f"and {len(rows) - MAX_DIFFERENCES} more")
    return "\n".join(lines)


def _header(plan: StepPlan, topology: Topology) -> dict[str, str]:
    batch, rows = plan.batch, plan.rows
    return {
        "epoch": str(batch.epoch),
        "step": str(batch.step),
        "layout id": f"{topology.layout_id:#018x}",
        "requests": " ".join(str(request.request_id) for request in batch.requests),
        "rows": f"{rows.num_rows}: {rows.num_copy} copied, {rows.num_distributed} dealt to a rank",
        "order of rows": _hash(rows.gather.tobytes() + rows.restore.tobytes()),
        "copied blocks": _hash(msgspec.msgpack.encode(batch.copies)),
        "wiped blocks": " ".join(map(str, batch.wiped_blocks)) or "none",
        "states and adapters": _hash(
            msgspec.msgpack.encode((batch.state_copies, batch.adapter_changes))
        ),
    }


def _requests(step: RankStep, topology: Topology) -> Iterator[tuple[str, str]]:
    requests, classes = step.plan.batch.requests, step.plan.classes
    slots = [
        row_slots(step, topology, group, topology.group_position(group, step.global_rank))
        for group in range(len(topology.groups))
        if step.plan.rows.num_rows
    ]
    for index, (request, row_class) in enumerate(zip(requests, classes, strict=True)):
        name = f"request {request.request_id}"
        yield f"{name} rows", _rows(request)
        yield f"{name} class", row_class.value
        for group in range(len(request.packed_tables)):
            yield f"{name} blocks of group {group}", _blocks(request.table(group).tolist())
        for group, slot_of_row in enumerate(slots):
            own = slot_of_row[_rows_of(step.rows, index)]
            yield f"{name} slots of group {group}", _hash(own.tobytes())
        yield f"{name} drawing", _hash(msgspec.msgpack.encode(request.samples))
        yield f"{name} in all", _hash(msgspec.msgpack.encode(request))


def _rows_of(rows: GlobalRows, index: int) -> npt.NDArray[np.int64]:
    return np.flatnonzero(rows.request == index)


def _rows(request: ScheduledRequest) -> str:
    tokens = _hash(msgspec.msgpack.encode(request.token_ids))
    return f"{len(request.token_ids)} after {request.num_computed_tokens}, tokens {tokens}"


def _blocks(blocks: Sequence[int]) -> str:
    shown = " ".join(map(str, blocks[:_MAX_BLOCKS]))
    if len(blocks) <= _MAX_BLOCKS:
        return shown
    return f"{shown} ... {len(blocks)} in all, {_hash(msgspec.msgpack.encode(list(blocks)))}"


def _choices(plan: StepPlan, group: int) -> str:
    chosen = plan.groups[group]
    classes = (
        f"{row_class.value} {part.context}/{part.returns}, {len(part.chunks)} chunks"
        for row_class, part in chosen.classes.items()
    )
    return "; ".join((f"new rows {chosen.new_rows}", *classes))


def _calls(plan: StepPlan, topology: Topology, global_rank: int) -> dict[str, str]:
    calls = list(collective_schedule(plan, topology, global_rank))
    return {"collectives": f"{len(calls)}, {_hash(msgspec.msgpack.encode(calls))}"}


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=4).hexdigest()
