"""Requests arrive, are routed, wait, run and end: the loop of a simulation.

    until nobody is left: take the earliest of (end of a step, arrival)
        end        account for it
        arrival    refuse it, or give it to the replica that an engine would choose
        then       those replicas that were touched begin their next step

What ends at a time is accounted for before what arrives at it, and both before the next step
begins. Refused are prompts that could never fit, and those that the door of a server turns away.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from heddle.config.engine import ResolvedConfig
from heddle.errors import EngineOverloaded, PromptTooLong
from heddle.planner.trace import TracedRequest
from heddle.scheduler.door import Door, Ticket
from heddle.simulator.group import NEVER, Group
from heddle.simulator.prices import Clock
from heddle.simulator.replica import OnStep, SimulatedReplica
from heddle.simulator.tally import Sample, Series, Tally, Times
from heddle.simulator.tokens import Names, RunTokens
from heddle.step.topology import Topology

_POINTS = 200
"""Samples in the time that arrivals take; what comes after them is sampled as well."""
_LEAST_INTERVAL = 1e-3


class Simulation:
    """One run; made once, run once.

    Args:
        resolved: what would serve.
        topology: constants of the engine.
        clock: what steps take.
        has_door: turn requests away as a server does when its queue is full.
        skips: False: quiet steps are made one by one; slower, and equal.
        on_step: told of each step that is made; give it together with `skips=False`.
        names: turns hashes into tokens; None: those of a Mooncake trace.
    """

    def __init__(
        self,
        resolved: ResolvedConfig,
        topology: Topology,
        clock: Clock,
        *,
        has_door: bool = True,
        skips: bool = True,
        on_step: OnStep | None = None,
        names: Names | None = None,
    ) -> None:
        parallel = resolved.parallel
        self.tally = Tally()
        self.series = Series(1.0)
        self.waits: dict[str, float] = {}
        """Samples of replicas, by what most of their waiting requests lacked; `nothing`: none."""
        self.replicas = [
            SimulatedReplica(
                index, resolved, topology, clock, self.tally, self._note_started, on_step
            )
            for index in range(parallel.data_parallel_size)
        ]
        together = parallel.enable_expert_parallel and resolved.model.moe is not None
        members = [self.replicas] if together else [[each] for each in self.replicas]
        stages = parallel.pipeline_parallel_size
        self._groups = [Group(each, stages, skips=skips) for each in members]
        self._group_of = [g for g, each in enumerate(members) for _ in each]
        self._names = names or Names()
        self._now = 0.0
        cache = self.replicas[0].cache
        pool = cache.num_usable_blocks * cache.virtual_block_size * len(self.replicas)
        self._door = (
            Door.from_config(resolved.scheduler, pool, lambda: self._now) if has_door else None
        )
        self._tickets: dict[int, Ticket] = {}
        self._heap: list[tuple[float, int]] = []
        self._watched = [NEVER] * len(self._groups)

    def run(self, requests: Sequence[TracedRequest]) -> None:
        """Serve a trace to its end.

        Args:
            requests: by time of arrival, each with one.
        """
        last = (requests[-1].arrival or 0.0) if requests else 0.0
        self.series.interval = max(last / _POINTS, _LEAST_INTERVAL)
        place, count = 0, len(requests)
        while place < count or self._heap:
            arrival = (requests[place].arrival or 0.0) if place < count else NEVER
            now = min(arrival, self._heap[0][0] if self._heap else NEVER)
            self._sample(now)
            self._now = now
            touched: set[int] = set()
            while self._heap and self._heap[0][0] <= now:
                touched |= self._end(heappop(self._heap)[1], now)
            while place < count and (requests[place].arrival or 0.0) <= now:
                request = requests[place]
                touched |= self._arrive(request, place, self._names.stand_ins(request, place))
                place += 1
            for index in sorted(touched):
                self._groups[index].begin(now)
                self._watch(index)
        self._sample(self.tally.end)

    def _end(self, index: int, now: float) -> set[int]:
        """A step or run of a group ends, unless it has been replaced since."""
        group = self._groups[index]
        if group.next_end != now:
            return set()
        for request_id in group.end():
            ticket = self._tickets.pop(request_id, None)
            if self._door is not None and ticket is not None:
                self._door.left(ticket)
        return {index}

    def _watch(self, index: int) -> None:
        """Come back when a group has something that ends."""
        end = self._groups[index].next_end
        if end != NEVER and end != self._watched[index]:
            heappush(self._heap, (end, index))
        self._watched[index] = end

    def _arrive(self, request: TracedRequest, place: int, tokens: RunTokens) -> set[int]:
        tally, length = self.tally, request.prompt_len
        scheduler = self.replicas[0].scheduler
        try:
            room = scheduler.resolve_room(length, request.output_len)
        except PromptTooLong:
            tally.too_long += 1
            return set()
        if self._door is not None:
            try:
                self._tickets[place] = self._door.enter(length, room)
            except EngineOverloaded:
                tally.queue_full += 1
                return set()
        tally.clipped += room < request.output_len
        tally.times[place] = Times(arrival=self._now, prompt_len=length)
        replica, settled = self._choose(tokens, may_hit=bool(request.prefix_hashes))
        index = self._group_of[replica.index]
        self._settle(index)
        replica.add(replica.create(place, tokens, room))
        return {index, *settled}

    def _settle(self, index: int) -> None:
        """Leave a run of a group; if one of its steps ends just now, the next is begun later."""
        self._groups[index].settle(self._now)
        self._watch(index)

    def _choose(self, tokens: RunTokens, *, may_hit: bool) -> tuple[SimulatedReplica, set[int]]:
        """As `heddle.engine.replica.choose_replica`: the least load, hits taken off; of equals the
        lowest.

        A hit is at most the prompt but one token, so replicas that even this would not make the
        best are not searched; and what a run would still add to a cache cannot be hit, so that runs
        are left only where something is.

        Returns:
            The replica, and the groups whose runs were left.
        """
        settled: set[int] = set()
        if len(self.replicas) == 1:
            return self.replicas[0], settled
        loads = [(each.load_at(self._now), each.index) for each in self.replicas]
        best = min(loads)
        if not may_hit:
            return self.replicas[best[1]], settled
        for load, index in sorted(loads):
            if load - len(tokens) + 1 > best[0]:
                break
            replica = self.replicas[index]
            hit = replica.num_hit_tokens(tokens)
            if hit:
                self._settle(self._group_of[index])
                settled.add(self._group_of[index])
                hit = replica.num_hit_tokens(tokens)
            best = min(best, (load - hit, index))
        return self.replicas[best[1]], settled

    def _note_started(self, request_id: int) -> None:
        """A request has left the queue."""
        if self._door is not None:
            self._door.started(self._tickets[request_id])

    def _sample(self, now: float) -> None:
        """Take the samples that are due by `now`, before anything happens then."""
        while self.series.next_time <= now < NEVER:
            time = self.series.next_time
            held = usable = 0
            for replica in self.replicas:
                replica.catch_up(time)
                replica.note_stored()
                cache = replica.cache
                held += cache.num_usable_blocks - cache.num_available_blocks
                usable += cache.num_usable_blocks
                self._note_waits(replica)
            self.series.add(
                Sample(
                    time,
                    held / usable if usable else 0.0,
                    sum(replica.scheduler.num_running for replica in self.replicas),
                    sum(replica.scheduler.num_waiting for replica in self.replicas),
                    self.tally.num_tokens,
                )
            )

    def _note_waits(self, replica: SimulatedReplica) -> None:
        """Weighed by the time that a sample stands for."""
        reason = "nothing"
        if replica.scheduler.num_waiting:
            counts = replica.scheduler.waiting_by_reason()
            reason = max(counts, key=lambda each: counts[each])
        self.waits[reason] = self.waits.get(reason, 0.0) + self.series.interval
