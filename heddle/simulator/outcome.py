"""What one simulated layout makes of a trace, as data: the figures of a document that depend on it.

Answers may be made in other processes, so what goes in and comes out is plain.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from heddle.config import ParallelConfig
from heddle.errors import ConfigError
from heddle.kvcache.groups import create_group_specs
from heddle.planner.cost import CostModel
from heddle.planner.devices import Edge
from heddle.planner.memory import PlannedEngine, plan_engine
from heddle.planner.settings import Settings
from heddle.planner.trace import TracedRequest
from heddle.simulator.prices import PriceTable
from heddle.simulator.replica import SimulatedReplica
from heddle.simulator.simulate import Simulation
from heddle.simulator.tally import Tally, Times, percentiles

_REASONS = {
    "capacity": "blocks",
    "seats": "seats",
    "prefill_slots": "prefill_slots",
    "next_step": "rows",
    "nothing": "nothing",
}
"""Names of a scheduler's reasons for waiting, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What a request is promised, in seconds; None: nothing.

    Raises:
        ConfigError: a target that is not above 0.
    """

    ttft: float | None = None
    tpot: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value} is not legal; it is a number of seconds above 0")

    @property
    def are_set(self) -> bool:
        """There is one."""
        return self.ttft is not None or self.tpot is not None

    def keeps(self, times: Times) -> bool:
        """A request that has ended kept them."""
        if times.first is None:
            return True
        is_soon = self.ttft is None or times.first - times.arrival <= self.ttft
        gap = (times.last - times.first) / max(times.num_tokens - 1, 1)
        return is_soon and (self.tpot is None or gap <= self.tpot)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One layout and one trace."""

    settings: Settings
    parallel: ParallelConfig
    requests: Sequence[TracedRequest]
    """By arrival, each with one."""
    targets: Targets
    edge: Edge = "mid"
    has_door: bool = True


def run_job(job: Job) -> dict[str, Any]:
    """Plan the layout's engine, and simulate it; see `heddle.simulator.document` for the keys.

    Raises:
        ConfigError: the layout is not legal, or does not fit.
    """
    return measure(plan_engine(job.settings, job.parallel), job)


def measure(engine: PlannedEngine, job: Job) -> dict[str, Any]:
    """Simulate an engine that is planned.

    Args:
        engine: of the job's layout.
        job: with the trace.
    """
    began = time.monotonic()
    clock = PriceTable(CostModel(engine, job.edge))
    simulation = Simulation(engine.resolved, engine.topology, clock, has_door=job.has_door)
    with _without_collector():
        simulation.run(job.requests)
    tally = simulation.tally
    duration = tally.end
    num_devices = _devices(engine)
    tok_s = _per(tally.num_tokens, duration)
    return {
        "requests": len(job.requests),
        **_counts(tally),
        "ttft": percentiles(
            [t.first - t.arrival for t in tally.times.values() if t.first is not None]
        ),
        "itl": tally.gaps.describe(),
        "e2e": percentiles([t.end - t.arrival for t in tally.times.values() if t.end is not None]),
        "duration_s": duration,
        "wall_s": time.monotonic() - began,
        "steps": tally.num_steps,
        "tok_s": tok_s,
        "tok_s_per_device": tok_s / num_devices,
        "prompt_tok_s": _per(sum(t.prompt_len for t in tally.times.values()), duration),
        **_kept(tally, job.targets),
        "series": simulation.series.describe(),
        "ranks": _ranks(engine, simulation.replicas),
        "decode_starvation": {
            "share_of_steps": _per(tally.num_starved_steps, tally.num_decode_steps),
            "longest_gap_s": tally.longest_gap,
        },
        "limited_by": _limits(simulation.waits),
    }


@contextmanager
def _without_collector() -> Iterator[None]:
    """A simulation makes millions of objects and no cycles: looking for some costs a third."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _counts(tally: Tally) -> dict[str, Any]:
    started = tally.times.values()
    return {
        "finished": sum(each.end is not None for each in started),
        "rejects": tally.too_long + tally.queue_full,
        "reject_reasons": {"too_long": tally.too_long, "queue_full": tally.queue_full},
        "clipped": tally.clipped,
        "preemptions": tally.preemptions,
        "hit_rate": _per(
            sum(each.num_cached for each in started), sum(each.prompt_len for each in started)
        ),
    }


def _kept(tally: Tally, targets: Targets) -> dict[str, Any]:
    """Goodput; what was refused keeps nothing."""
    found: dict[str, Any] = {"ttft": targets.ttft, "tpot": targets.tpot, "kept_share": None}
    if not targets.are_set:
        return {"goodput": None, "targets": found}
    kept = sum(targets.keeps(each) for each in tally.times.values() if each.end is not None)
    arrived = len(tally.times) + tally.too_long + tally.queue_full
    found["kept_share"] = _per(kept, arrived)
    return {"goodput": _per(kept, tally.end), "targets": found}


def _ranks(engine: PlannedEngine, replicas: Sequence[SimulatedReplica]) -> dict[str, Any]:
    """By global rank."""
    topology, resolved = engine.topology, engine.resolved
    mesh = topology.mesh
    rows = [0.0] * mesh.world_size
    stored = [0] * mesh.world_size
    specs = create_group_specs(
        topology.groups, resolved.parallel.kv_interleave_size, resolved.cache.block_size
    )
    dcp_rank = {rank: at for group in mesh.groups("dcp") for at, rank in enumerate(group)}
    for replica in replicas:
        shares = [0] * (specs[0].layout.world_size if specs else 0)
        for length, start in replica.most_stored:
            layout = specs[0].layout_at(start) if specs else None
            for at in range(len(shares)):
                shares[at] += layout.local_len(length, at) if layout is not None else 0
        for rank in mesh.ranks_of_replica(replica.index):
            rows[rank] = replica.num_rows
            stored[rank] = shares[dcp_rank[rank] % len(shares)] if shares else 0
    return {
        "rows": [round(count) for count in rows],
        "kv_tokens": stored,
        "imbalance": _imbalance(rows),
        "kv_imbalance": _imbalance(stored),
    }


def _imbalance(values: Sequence[float]) -> float:
    """The largest over the mean; 1 where there is nothing."""
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0


def _limits(waits: dict[str, float]) -> dict[str, float]:
    total = sum(waits.values())
    return {name: _per(waits.get(reason, 0.0), total) for reason, name in _REASONS.items()}


def _devices(engine: PlannedEngine) -> int:
    world = engine.parallel.world_size
    return world * engine.settings.devices_per_rank(world)


def _per(value: float, whole: float) -> float:
    return value / whole if whole else 0.0
