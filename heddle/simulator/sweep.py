"""Several simulations beside each other: both ends of the sheet's ranges, and other layouts.

Layouts are those that a plan finds for the devices. All of them can be too many, so those are taken
that the plan ranks first by throughput, by first token, by gap and by room, in turn.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Any

from heddle.planner.document import layout
from heddle.planner.search import ORDERS, Candidate
from heddle.simulator.document import serve_flags
from heddle.simulator.outcome import Job, run_job

MAX_LAYOUTS = 12
_ENTRY = (
    "ttft",
    "itl",
    "e2e",
    "tok_s",
    "tok_s_per_device",
    "goodput",
    "rejects",
    "preemptions",
    "hit_rate",
)
"""What a sweep tells of a layout."""
_BOUNDED = ("ttft", "itl", "e2e")


def run_jobs(jobs: Sequence[Job], num_processes: int | None = None) -> list[dict[str, Any]]:
    """Answers to jobs, in their order.

    Args:
        jobs: whose layouts fit.
        num_processes: at once; None: one per core that this process may use.
    """
    count = min(num_processes or len(os.sched_getaffinity(0)), len(jobs))
    if count <= 1:
        return [run_job(job) for job in jobs]
    context = multiprocessing.get_context("spawn")  # a fork of a program with threads may hang
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        return list(pool.map(run_job, jobs))


def choose(candidates: Sequence[Candidate], most: int = MAX_LAYOUTS) -> list[Candidate]:
    """Layouts that are worth a simulation, in the order of the plan.

    Args:
        candidates: of a search.
        most: layouts.
    """
    serving = [(each, each.prediction) for each in candidates if each.prediction is not None]
    orders = [[each for each, _ in sorted(serving, key=key)] for key in ORDERS]
    in_turn = chain.from_iterable(zip(*orders, strict=True))
    chosen = list(dict.fromkeys(id(each) for each in in_turn))[:most]
    return [each for each in candidates if id(each) in chosen]


def bounds_of(low: dict[str, Any], high: dict[str, Any], mid: dict[str, Any]) -> dict[str, Any]:
    """(least, most) of figures over the ranges of a sheet.

    Args:
        low: an answer at the slow ends.
        high: at the fast ones.
        mid: in the middle.
    """
    found: dict[str, Any] = {}
    for name in _BOUNDED:
        parts = [answer[name] for answer in (low, mid, high) if answer[name] is not None]
        found[name] = {
            p: [min(part[p] for part in parts), max(part[p] for part in parts)]
            for p in ("p50", "p90", "p99")
            if parts
        }
    rates = [answer["tok_s"] for answer in (low, mid, high)]
    return {**found, "tok_s": [min(rates), max(rates)]}


def edges(job: Job) -> list[Job]:
    """The same at the slow and at the fast ends of the sheet's ranges."""
    return [replace(job, edge="low"), replace(job, edge="high")]


def entries(
    candidates: Sequence[Candidate], answers: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """What a sweep tells, those on a front first, then by throughput of a device.

    Args:
        candidates: layouts.
        answers: to each of them.
    """
    found = [
        {
            "layout": layout(each.parallel, each.engine.resolved.cache.block_size),
            "flags": serve_flags(each.engine),
            "devices": each.num_devices,
            **{name: answer[name] for name in _ENTRY},
            "on_front": False,
        }
        for each, answer in zip(candidates, answers, strict=True)
    ]
    for name in ("itl", "ttft"):
        points = [(entry["tok_s_per_device"], _late(entry, name)) for entry in found]
        for at in front(points):
            found[at]["on_front"] = True
    return sorted(found, key=lambda entry: (not entry["on_front"], -entry["tok_s_per_device"]))


def front(points: Sequence[tuple[float, float]]) -> Iterator[int]:
    """Places of those that no other beats: none gives at least as much at most as late, and is
    better in one.

    Args:
        points: (the more the better, the less the better) of each.
    Example:
        >>> list(front([(10, 1.0), (20, 2.0), (15, 3.0), (20, 2.0)]))
        [0, 1, 3]
    """
    for at, (much, late) in enumerate(points):
        if not any(
            other[0] >= much and other[1] <= late and other != (much, late) for other in points
        ):
            yield at


def _late(entry: dict[str, Any], name: str) -> float:
    """The 99th percentile; what answered nothing is never early."""
    found = entry[name]
    late: float = found["p99"] if found is not None else float("inf")
    return late
