"""Where the numbers of an engine come from: its steps as they end, its requests as they end.

    driver --submit--> WatchedExecutor --submit--> ranks         begin of a step
           <-collect--                 <-collect--               end, and seconds of each rank
           --count_step----> WatchedCounters                     what the step brought
           --count_request->                                     the request's times

All of it happens in the engine's thread, in this order, so the step that was collected last is the
one that is counted next.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from heddle.engine.counters import Counters
from heddle.engine.driver import Driver
from heddle.engine.executors.base import Executor
from heddle.engine.replica import Replica
from heddle.engine.request_state import RequestState
from heddle.engine.shadow.shadow import RESULTS
from heddle.errors import MISMATCH_KINDS
from heddle.scheduler.batch import ScheduledBatch, ScheduledPart
from heddle.scheduler.request import Request, RequestStatus
from heddle.server import metric_table as table
from heddle.server.canary import Canaries, without_canaries
from heddle.server.engine_state import QueueState, Totals
from heddle.server.rank_numbers import RankNumbers, how_launched, max_over_mean, note_load
from heddle.server.request_numbers import Values, add, note_request
from heddle.server.step_timer import EndedStep, WatchedExecutor
from heddle.step.topology import Topology

log = logging.getLogger("heddle.engine")
LOOK_INTERVAL_SECONDS = 1.0
"""Between two looks at what changes slowly and costs time per sequence to find out."""


@dataclass(slots=True)
class _Seen:
    """A sequence that has run."""

    request: Request
    replica: int
    begin: float
    """Of its first step."""
    num_prompt_tokens: int = 0
    """That were counted; those computed again after a preemption are not."""
    num_outputs: int = 0
    last_token: float | None = None


class WatchedCounters(Counters):
    """The driver's counters, which tell what they count."""

    def __init__(self, before: Counters, watch: EngineWatch) -> None:
        """Go on from where other counters are."""
        super().__init__()
        self._totals.update(before.totals())
        self._watch = watch

    def count_step(self, scheduled: ScheduledBatch) -> None:
        """A step has ended on all ranks."""
        counted = without_canaries(scheduled)
        if counted.parts or counted is scheduled:
            super().count_step(counted)
        self._watch.note_step(counted)

    def count_request(self, state: RequestState) -> None:
        """A request has ended."""
        super().count_request(state)
        self._watch.note_request(state)

    def count_mismatch(self, kind: str) -> None:
        """A step stopped because ranks and driver disagreed."""
        super().count_mismatch(kind)
        self._watch.note_mismatch(kind)

    def count_fault(self) -> None:
        """Ranks have failed; they are being started anew."""
        super().count_fault()
        self._watch.note_ranks(up=False)

    def count_recovery(self, epoch: int, seconds: float, num_replayed: int) -> None:
        """New ranks are there."""
        super().count_recovery(epoch, seconds, num_replayed)
        self._watch.note_recovery(epoch, seconds, num_replayed)

    def count_condemned(self) -> None:
        """A request has ended because ranks fail of it."""
        super().count_condemned()
        self._watch.note_condemned()


class EngineWatch:
    """Turns what a driver does into numbers. Belongs to the engine's thread."""

    def __init__(self, values: Values, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with nothing.

        Args:
            values: where numbers go.
            clock: monotonic seconds, the same as the driver's.
        """
        self.totals = Totals()
        self.ranks = RankNumbers(values)
        self._values, self._clock = values, clock
        self.canaries: Canaries | None = None
        """Of the driver that is listened to; requests and steps are counted without them."""
        self._executor: WatchedExecutor | None = None
        self._topology: Topology | None = None
        self._seen: dict[int, _Seen] = {}
        self._last_look = float("-inf")
        self._why_waiting = ""

    def around(self, executor: Executor) -> WatchedExecutor:
        """The executor that a driver is to use instead; asked for again when ranks are new."""
        self._executor = WatchedExecutor(executor, self._clock)
        return self._executor

    def listen(self, driver: Driver) -> None:
        """Count what a driver does from now on; it has no open request."""
        assert self._executor is not None, "around comes first"
        self.canaries = Canaries(driver, self._last_end)
        self._topology = Topology.from_resolved(driver.resolved)
        driver.counters = WatchedCounters(driver.counters, self)
        for replica in driver.replicas:
            self._begin_with_zeros(replica.index)
            self._values.of("engine_epoch", replica.index).set(driver.resolved.epoch)
        self.note_ranks(up=True)

    def ranks_of(self, replica: int) -> Sequence[int]:
        """Global ranks of a replica."""
        assert self._topology is not None, "listen comes first"
        return self._topology.mesh.ranks_of_replica(replica)

    def _last_end(self, replica: int) -> float:
        """When the ranks that a replica has now last had all answered a step."""
        assert self._executor is not None, "listen without around"
        return self._executor.last_end(replica)

    def resident_bytes(self) -> list[int]:
        """Memory of each rank's process; empty where ranks are no processes of this host."""
        pids = () if self._executor is None else self._executor.pids
        try:
            return [int(psutil.Process(pid).memory_info().rss) for pid in pids]
        except psutil.Error:
            return []  # one has just ended; `rank_up` tells

    # A step.

    def note_step(self, scheduled: ScheduledBatch) -> None:
        """The step that was collected last is accounted for."""
        assert self._executor is not None, "listen without around"
        step = self._executor.ended
        assert step is not None
        self.ranks.note(step, self.ranks_of(step.replica))
        for request_id in scheduled.preempted:
            log.info("sequence %d preempted: others needed its blocks", request_id)
        self.totals.num_preemptions += len(scheduled.preempted)
        add(self._values, "num_preemptions", step.replica, len(scheduled.preempted))
        if not scheduled.parts:
            return
        self.totals.num_steps += 1
        kind = kind_of(scheduled)
        values, replica = self._values, step.replica
        values.of("step_seconds", replica, kind=kind).observe(step.end - step.begin)
        values.of("steps", replica, how=how_launched(step.replies)).inc()
        values.of("iteration_tokens_total", replica).observe(scheduled.num_rows)
        if kind != "decode":
            assert self._topology is not None
            note_load(values, step, self._topology)
        num_new = sum([self._note_part(part, step) for part in scheduled.parts])
        self.totals.num_generation_tokens += num_new
        add(values, "generation_tokens", replica, num_new)

    def _note_part(self, part: ScheduledPart, step: EndedStep) -> int:
        """Account for one sequence; returns its new tokens."""
        request = part.request
        seen = self._seen.get(request.request_id)
        if seen is None and request.finish_reason in ("abort", "error"):
            return 0  # it was counted when it ended, while this step was under way
        if seen is None:
            seen = self._seen[request.request_id] = _Seen(request, step.replica, step.begin)
            if request.choice == 0:
                self._note_lookup(request, step.replica)
        if request.choice == 0 and seen.num_prompt_tokens < request.num_prompt_tokens:
            self._note_prompt_rows(part, seen)  # choices share a prompt, which counts once
        num_new = len(request.output_token_ids) - seen.num_outputs
        if num_new > 0:
            if seen.last_token is not None:
                gap = (step.end - seen.last_token) / num_new
                observe = self._values.of("inter_token_latency_seconds", step.replica).observe
                for _ in range(num_new):
                    observe(gap)
            seen.num_outputs += num_new
            seen.last_token = step.end
        return num_new

    def _note_lookup(self, request: Request, replica: int) -> None:
        self.totals.num_looked_up_tokens += request.num_prompt_tokens
        self.totals.num_found_tokens += request.num_cached_tokens
        add(self._values, "prefix_cache_queries", replica, request.num_prompt_tokens)
        add(self._values, "prefix_cache_hits", replica, request.num_cached_tokens)

    def _note_prompt_rows(self, part: ScheduledPart, seen: _Seen) -> None:
        start, mark = part.num_computed_tokens, seen.num_prompt_tokens
        total = part.request.num_prompt_tokens
        end = min(start + part.num_known_tokens, total)
        if end <= mark:
            return
        cached = max(0, min(start, total) - mark)
        computed = end - mark - cached
        seen.num_prompt_tokens = end
        self.totals.num_prompt_tokens += cached + computed
        add(self._values, "prompt_tokens", seen.replica, cached + computed)
        add(self._values, "prompt_tokens_cached", seen.replica, cached)
        add(self._values, "prompt_tokens_by_source", seen.replica, computed, source="local_compute")
        add(self._values, "prompt_tokens_by_source", seen.replica, cached, source="local_cache_hit")

    def note_request(self, state: RequestState) -> None:
        """A request has ended, in whatever way."""
        known = [self._seen.pop(each.request_id, None) for each in state.sequences]
        seen = [each for each in known if each is not None]
        replica = seen[0].replica if seen else 0
        note_request(self._values, state, replica, min((s.begin for s in seen), default=None))

    # Between steps.

    def look(self, driver: Driver) -> None:
        """Copy what nobody but the engine's thread may walk through."""
        for replica in driver.replicas:
            for reason, count in replica.scheduler.waiting_by_reason().items():
                self._values.of("num_requests_waiting_by_reason", replica.index, reason=reason).set(
                    count
                )
        now = self._clock()
        if now - self._last_look < LOOK_INTERVAL_SECONDS:
            return
        self._last_look = now
        for replica in driver.replicas:
            self._values.of("kv_imbalance_ratio", replica.index).set(self._imbalance(replica.index))
        reasons = (replica.scheduler.why_waiting() for replica in driver.replicas)
        self._why_waiting = next((reason for reason in reasons if reason), "")

    def num_running(self, replica: Replica) -> int:
        """Sequences of requests that hold blocks; any thread may ask."""
        return self._less_canaries(replica, replica.scheduler.num_running, RequestStatus.RUNNING)

    def num_waiting(self, replica: Replica) -> int:
        """Sequences of requests that wait; any thread may ask."""
        return self._less_canaries(replica, replica.scheduler.num_waiting, RequestStatus.WAITING)

    def _less_canaries(self, replica: Replica, number: int, status: RequestStatus) -> int:
        hidden = 0 if self.canaries is None else self.canaries.num_open(replica.index, status)
        return max(0, number - hidden)  # the two may not be of the same moment

    def queue_state(self, driver: Driver) -> QueueState:
        """Lengths as they are now; any thread may ask."""
        caches = [replica.cache for replica in driver.replicas]
        num_waiting = sum(map(self.num_waiting, driver.replicas))
        return QueueState(
            num_running=sum(map(self.num_running, driver.replicas)),
            num_waiting=num_waiting,
            kv_usage=max(1 - c.num_available_blocks / max(c.num_usable_blocks, 1) for c in caches),
            why_waiting=self._why_waiting if num_waiting else "",
        )

    def _imbalance(self, replica: int) -> float:
        """KV tokens of the fullest DCP rank over the mean."""
        assert self._topology is not None
        held = [0] * self._topology.mesh.dcp_size
        for seen in self._seen.values():
            layout = seen.request.kv_layout
            if seen.replica == replica and layout is not None:
                for rank in range(len(held)):
                    held[rank] += layout.local_len(seen.request.num_computed_tokens, rank)
        return max_over_mean(held)

    def _begin_with_zeros(self, replica: int) -> None:
        """A rate over a counter needs the value from before the first event."""
        sets = {
            "request_success": ("finished_reason", table.FINISH_REASONS),
            "requests_aborted": ("where", table.ABORT_PLACES),
            "prompt_tokens_by_source": ("source", table.PROMPT_SOURCES),
            "num_requests_waiting_by_reason": ("reason", table.WAIT_REASONS),
            "step_seconds": ("kind", table.STEP_KINDS),
            "steps": ("how", table.LAUNCHES),
            "step_mismatch": ("kind", MISMATCH_KINDS),
            "verify_rows": ("result", RESULTS),
            "rank_busy_seconds": ("rank", self.ranks_of(replica)),
            "rank_collective_seconds": ("rank", self.ranks_of(replica)),
        }
        for name, (label, words) in sets.items():
            for word in words:
                self._values.of(name, replica, **{label: word})
        for metric in table.METRICS:
            if not (metric.labels or metric.is_common):
                self._values.of(metric.name, replica)
        for name in ("pcp_load_ratio", "kv_imbalance_ratio"):
            self._values.of(name, replica).set(1)

    # Ranks come and go, all of them together.

    def note_ranks(self, *, up: bool) -> None:
        """Every rank works, or none does any more."""
        assert self._topology is not None, "listen comes first"
        for replica in range(self._topology.mesh.dp_size):
            for rank in self.ranks_of(replica):
                self._values.of("rank_up", replica, rank=rank).set(int(up))

    def note_recovery(self, epoch: int, seconds: float, num_replayed: int) -> None:
        """New ranks are there."""
        assert self._topology is not None, "listen comes first"
        self.note_ranks(up=True)
        for replica in range(self._topology.mesh.dp_size):
            self._values.of("engine_epoch", replica).set(epoch)
        self._values.of("recovery_seconds").observe(seconds)
        add(self._values, "recoveries", 0, 1)
        add(self._values, "requests_replayed", 0, num_replayed)

    def note_mismatch(self, kind: str) -> None:
        """A step stopped because ranks and driver disagreed."""
        add(self._values, "step_mismatch", 0, 1, kind=kind)

    def note_condemned(self) -> None:
        """A request has ended because ranks fail of it."""
        add(self._values, "requests_condemned", 0, 1)


def kind_of(scheduled: ScheduledBatch) -> str:
    """What a step computes: `decode` where every part is one known row, and its drafts, after which
    a token is drawn; `prefill` where no part is; else `mixed`.
    """
    decodes = [part.samples and part.num_known_tokens == 1 for part in scheduled.parts]
    if all(decodes):
        return "decode"
    return "mixed" if any(decodes) else "prefill"
