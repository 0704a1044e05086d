"""Trace events by hand, in the format of `heddle.engine.trace_file`."""

from __future__ import annotations

from typing import Any

DRIVER = 2
LAYOUT = {
    **{"tp": 1, "pcp": 2, "dcp": 2, "pp": 1, "dp": 1, "interleave": 1, "block_size": 16},
    **{"exchange": "auto", "executor": "threads", "world_size": 2},
}


def header(layout: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """What stands at the start of a file."""
    about = {"layout": layout or LAYOUT, "num_layers": 1}
    names = ["rank 0 (dp0 pp0 tp0 pcp0)", "rank 1 (dp0 pp0 tp0 pcp1)", "driver"]
    return [
        {"name": "heddle", "ph": "M", "pid": DRIVER, "args": about},
        *(
            {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}
            for pid, name in enumerate(names)
        ),
    ]


def span(name: str, pid: int, ts: float, dur: float, **facts: Any) -> dict[str, Any]:
    """A complete event."""
    return {"name": name, "ph": "X", "pid": pid, "tid": 0, "ts": ts, "dur": dur, "args": facts}


def step(number: int, at: float, *, epoch: int = 0, rows: int = 8) -> list[dict[str, Any]]:
    """One step of two ranks: a part, and a collective in it."""
    whole = {"step": number, "epoch": epoch, "rows": rows, "reasons": [f"why {number}"]}
    requests = [{"request": 7, "rows": rows, "cached": 5}]
    events = [span(f"step {number}", DRIVER, at - 3, 106, requests=requests, **whole)]
    for rank in range(2):
        call = {"op": "all_gather", "group": "dcp", "bytes": 100 * number + rank}
        why = {"carries": "new KV rows", "reason": "later rows see them"}
        begin = at + rank
        events += [
            span(f"step {number}", rank, begin, 100, step=number, rows=rows // 2),
            span("attention", rank, begin + 10, 80, step=number, layer=0),
            span("all_gather dcp", rank, begin + 20, 30, step=number, layer=0, **call, **why),
        ]
    return events
