"""The same arrivals for a driver and for a simulation, and what each decides, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from heddle.config import ResolvedConfig, SamplingParams
from heddle.engine.driver import Driver
from heddle.engine.inputs import PromptInput
from heddle.errors import PromptTooLong
from heddle.planner.trace import TracedRequest
from heddle.scheduler.batch import ScheduledBatch
from heddle.simulator.prices import Clock, UnitClock
from heddle.simulator.simulate import Simulation
from heddle.simulator.tokens import Names
from heddle.step.topology import Topology

HASHED = 8
"""Tokens of one hash here: traces are short."""
FIRST_ID = 2
"""Token ids from here on mean nothing to a model; 1 ends a text."""

Step = tuple[int, tuple[tuple[int, int, int], ...], tuple[int, ...]]
"""Replica; (place in the trace, computed before, rows) of each part; places that were preempted."""


@dataclass
class Decided:
    """What was decided."""

    steps: list[Step] = field(default_factory=list)
    hits: dict[int, int] = field(default_factory=dict)
    """Prompt tokens found in the cache, by place."""
    ends: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(step after which it had ended, tokens of the answer), by place."""
    refused: int = 0


def decided_by_simulation(
    resolved: ResolvedConfig,
    requests: Sequence[TracedRequest],
    *,
    skips: bool = False,
    clock: Clock | None = None,
) -> tuple[Decided, Simulation]:
    """Times of requests are numbers of steps, unless a clock is given."""
    found = Decided()

    def note(replica: int, batch: ScheduledBatch) -> None:
        found.steps.append(_step(replica, batch, {}))

    simulation = Simulation(
        resolved,
        Topology.from_resolved(resolved),
        clock or UnitClock(),
        has_door=False,
        skips=skips,
        on_step=note,
        names=Names(HASHED),
    )
    simulation.run(requests)
    for place, times in simulation.tally.times.items():
        assert times.end is not None
        found.hits[place] = times.num_cached
        found.ends[place] = (int(times.end), times.num_tokens)
    found.refused = simulation.tally.too_long
    return found, simulation


def decided_by_driver(driver: Driver, requests: Sequence[TracedRequest]) -> Decided:
    """A driver is given the requests whose time has come, then makes one step of each replica."""
    found, places, outputs = Decided(), {}, {}
    for replica in driver.replicas:
        _record(replica, found, places)
    names, ids = Names(HASHED), {}
    now, waiting = 0, list(enumerate(requests))
    while waiting or driver.has_work:
        if not driver.has_work and not driver.is_busy:
            now = max(now, int(waiting[0][1].arrival or 0))
        while waiting and (waiting[0][1].arrival or 0) <= now:
            place, request = waiting.pop(0)
            tokens = names.stand_ins(request, place)
            prompt = [ids.setdefault(token, FIRST_ID + len(ids)) for token in tokens]
            answer = ids.setdefault(tokens.answer, FIRST_ID + len(ids))
            params = SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=True)
            try:
                name = driver.add(
                    PromptInput(token_ids=tuple(prompt)),
                    params,
                    teacher=(answer,) * request.output_len,
                )
            except PromptTooLong:
                found.refused += 1
                continue
            outputs[name], places[len(places)] = place, place
        if not driver.has_work:
            continue
        for output in _round(driver, len(driver.replicas)):
            if output.finished:
                place = outputs[output.request_id]
                found.hits[place] = output.num_cached_tokens
                found.ends[place] = (now + 1, len(output.outputs[0].token_ids))
        now += 1
    driver.audit()
    return found


def _round(driver: Driver, num_replicas: int) -> Iterator[Any]:
    """One step of each replica; replicas in lockstep begin together."""
    yield from driver.step()
    while num_replicas > 1 and driver.is_busy:
        yield from driver.step()


def _record(replica: Any, found: Decided, places: dict[int, int]) -> None:
    schedule = replica.scheduler.schedule

    def noting() -> ScheduledBatch | None:
        batch = schedule()
        if batch is not None:
            found.steps.append(_step(replica.index, batch, places))
        return batch

    replica.scheduler.schedule = noting


def _step(replica: int, batch: ScheduledBatch, places: dict[int, int]) -> Step:
    return (
        replica,
        tuple(
            (
                places.get(part.request.request_id, part.request.request_id),
                part.num_computed_tokens,
                part.num_scheduled_tokens,
            )
            for part in batch.parts
        ),
        tuple(places.get(number, number) for number in batch.preempted),
    )
