"""One replica: its queue of requests, its KV accounting, and its steps under way.

    admit --> scheduler.schedule --> build_batch --> plan (digest) --> [under way] --> the executor
                   ^                                                        |
                   +---------------- scheduler.update <--- replies ---------+

An engine without data parallelism has one. A replica's load is the tokens of its open sequences:
those to be computed are work, those stored are read by every further token.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from heddle.config.engine import ResolvedConfig
from heddle.engine.executors.base import Submission
from heddle.engine.grammar.matcher import Matcher
from heddle.engine.shadow.choosing import ProbeChooser, collect_probe
from heddle.engine.trace import MAX_RECORDS, StepRecord
from heddle.engine.trace_file import TraceFile
from heddle.kvcache.keys import CacheScope
from heddle.scheduler.batch import ScheduledBatch, ScheduledPart
from heddle.scheduler.drafts import Drafter
from heddle.scheduler.pacing import StepLoad
from heddle.scheduler.request import FinishReason, Request
from heddle.scheduler.scheduler import Scheduler
from heddle.step.accounting import create_cache, create_pacer
from heddle.step.agree import check_calls, check_coverage
from heddle.step.batch import AdapterChange, RankReply, SampledToken
from heddle.step.build import BadWordIds, build_batch
from heddle.step.coverage import expected_coverage
from heddle.step.kv_words import kv_debug
from heddle.step.plan import StepPlan, plan
from heddle.step.probe import Probed
from heddle.step.topology import Topology

Sampled = dict[int, list[SampledToken]]
"""By request id, what a step found: several tokens where drafts were accepted."""


class StepOutcome(NamedTuple):
    """A step that has ended on all ranks."""

    scheduled: ScheduledBatch
    sampled: Sampled
    failed: set[int]
    """Ids of requests that end because some numbers were bad."""
    probed: Probed | None = None
    """The row that was looked at."""
    bad_ranks: tuple[int, ...] = ()
    """Global ranks that had NaN or inf in rows for the head."""
    adapter_changes: tuple[AdapterChange, ...] = ()
    """That all ranks of the replica have made."""


class Replica:
    """What the driver keeps for one DP coordinate. Its requests never move to another."""

    def __init__(
        self,
        index: int,
        resolved: ResolvedConfig,
        topology: Topology,
        *,
        clock: Callable[[], float] = time.monotonic,
        trace: TraceFile | None = None,
    ) -> None:
        """Begin empty.

        Args:
            index: its DP coordinate.
            resolved: what runs.
            topology: constants of the engine.
            clock: monotonic seconds, by which steps are timed.
            trace: told of each step; None: nobody is.
        """
        self.index = index
        self._trace = trace
        self.cache = create_cache(resolved, topology)
        num_stages = resolved.parallel.pipeline_parallel_size
        self._clock = clock
        self.pacer = create_pacer(resolved)
        """What rows cost here."""
        self.scheduler = Scheduler(
            resolved.scheduler, self.cache, num_places=num_stages, pacer=self.pacer
        )
        self._topology = topology
        self._epoch = resolved.epoch
        self._first_rank = topology.mesh.ranks_of_replica(index)[0]
        self._num_begun = 0
        """Steps of this epoch: ranks take them without gaps only."""
        self._under_way: deque[_UnderWay] = deque()
        self.records: deque[StepRecord] = deque(maxlen=MAX_RECORDS)
        """Of the last steps, oldest first."""
        self._debugs_kv = resolved.debug_kv
        if resolved.debug_kv:
            self.cache.note_freed()
        self.probes = ProbeChooser(resolved.verify_every)
        """Chooses rows to look at."""
        self._bad_words: dict[int, BadWordIds] = {}
        self._matchers: dict[int, Matcher] = {}
        self._adapter_changes: list[AdapterChange] = []
        self._counted: dict[int, int] = {}
        self._load = 0
        self._drafter = Drafter(resolved.speculative) if resolved.speculative else None

    @property
    def load(self) -> int:
        """Tokens of all open sequences."""
        return self._load

    @property
    def has_changes(self) -> bool:
        """Its ranks are yet to be told of a change, even if nothing can run."""
        return bool(self._adapter_changes)

    def change_adapters(self, *changes: AdapterChange) -> None:
        """Let the next step begin with changes, after those that wait already."""
        self._adapter_changes += changes

    @property
    def num_under_way(self) -> int:
        """Steps that were begun and have not ended."""
        return len(self._under_way)

    def num_hit_tokens(self, token_ids: Sequence[int], scope: CacheScope) -> int:
        """Tokens of a prompt that need no computing here."""
        return self.cache.lookup(self.cache.new_sequence(scope), token_ids).num_tokens

    def admit(
        self, sequence: Request, bad_words: BadWordIds, matcher: Matcher | None = None
    ) -> None:
        """Queue a sequence; see `Scheduler.add`. What it may draw is asked of `matcher`."""
        self.scheduler.add(sequence)
        if bad_words:
            self._bad_words[sequence.request_id] = bad_words
        if matcher is not None:
            self._matchers[sequence.request_id] = matcher
        self._count(sequence)

    def withdraw(self, sequence: Request) -> None:
        """Take an open sequence that is in no step out; `admit` brings it back."""
        self.scheduler.withdraw(sequence.request_id)
        self.forget(sequence)

    def requests_under_way(self) -> Iterator[Request]:
        """Sequences in steps that have not ended."""
        return self.scheduler.requests_under_way()

    def finish(
        self, sequence: Request, reason: FinishReason, stop_reason: int | str | None
    ) -> None:
        """End a sequence for a reason that the driver found; see `Scheduler.finish`."""
        self.scheduler.finish(sequence.request_id, reason, stop_reason)
        self.forget(sequence)

    def forget(self, sequence: Request) -> None:
        """Let go of a sequence that has ended; a second call does nothing."""
        self._load -= self._counted.pop(sequence.request_id, 0)
        self._bad_words.pop(sequence.request_id, None)
        self._matchers.pop(sequence.request_id, None)
        if self._drafter is not None:
            self._drafter.forget(sequence.request_id)

    def begin_step(self) -> Submission | None:
        """Choose the next step; None if nothing can run now."""
        begin_seconds = self._clock()
        self.cache.expire_pins(begin_seconds)
        scheduled = self.scheduler.schedule()
        return None if scheduled is None else self._begin(scheduled, begin_seconds)

    def begin_empty_step(self) -> Submission:
        """A step without rows, for the sake of the other replicas."""
        return self._begin(ScheduledBatch(parts=()), self._clock())

    def note_sent(self) -> None:
        """The newest step is with its ranks: do what none of them waits for."""
        sent = self._under_way[-1]
        self.records.append(StepRecord.of(self.index, sent.plan))
        _ = sent.coverage  # wanted when the step ends

    def end_step(
        self, replies: Sequence[RankReply], siblings_of: Callable[[int], set[int]]
    ) -> StepOutcome:
        """Account for the oldest step under way.

        Args:
            replies: of this replica's ranks, in order of rank.
            siblings_of: ids of all choices of the request that an id belongs to, itself included.
        Raises:
            PlanMismatch: KV rows were not written as planned, or a token is missing.
        """
        ended = self._under_way.popleft()
        scheduled, batch = ended.scheduled, ended.plan.batch
        check_calls(replies, self._topology, self._first_rank)
        check_coverage(replies, batch, ended.coverage, self._topology, self._first_rank)
        sampled: Sampled = {}
        for reply in replies:
            for found in reply.sampled:
                sampled.setdefault(found.request_id, []).append(found)
        probed = collect_probe(
            scheduled, batch, replies, sampled.get(batch.probe, []), self._first_rank
        )
        # They share a prompt, so the blocks of none of them may be found again.
        failed = {id_ for bad in _failed_ids(scheduled, sampled) for id_ in siblings_of(bad)}
        if scheduled.parts:
            tokens = {request_id: _token_ids(found) for request_id, found in sampled.items()}
            self.scheduler.update(scheduled, tokens, failed)
        now = self._clock()
        self.pacer.observe(
            StepLoad.of(scheduled, self.pacer.attention_length), now - ended.begin_seconds
        )
        if self._trace is not None:
            self._trace.add_step(self.index, ended.plan, ended.begin_seconds, now, replies)
        bad = (rank for rank, reply in enumerate(replies, self._first_rank) if reply.num_bad_rows)
        changes = batch.adapter_changes
        return StepOutcome(scheduled, sampled, failed, probed, tuple(bad), changes)

    def after_step(self, scheduled: ScheduledBatch) -> None:
        """Look at the requests of an ended step once more, when their answers know of it."""
        for part in scheduled.parts:
            if part.request.request_id in self._counted:
                self._count(part.request)
        if self._drafter is not None:
            self._drafter.propose_drafts(part.request for part in scheduled.parts)

    def _begin(self, scheduled: ScheduledBatch, begin_seconds: float) -> Submission:
        number, self._num_begun = self._num_begun, self._num_begun + 1
        batch = build_batch(
            scheduled,
            self._topology,
            epoch=self._epoch,
            step=number,
            bad_words=self._bad_words,
            grammar_masks=self._grammar_masks(scheduled),
            adapter_changes=self._adapter_changes,
            probe=self.probes.choose(scheduled),
            kv_debug=kv_debug(scheduled, self.cache.take_freed()) if self._debugs_kv else None,
        )
        self._adapter_changes = []
        step_plan = plan(batch, self._topology)
        self._under_way.append(_UnderWay(scheduled, step_plan, self._topology, begin_seconds))
        return batch, step_plan.digest

    def _grammar_masks(self, scheduled: ScheduledBatch) -> dict[int, bytes]:
        """What the sequences that draw may draw, those without a grammar left out."""
        ids = (part.request.request_id for part in scheduled.parts if part.samples)
        return {id_: self._matchers[id_].mask() for id_ in ids if id_ in self._matchers}

    def _count(self, sequence: Request) -> None:
        """Bring the load up to a sequence's present length."""
        self._load += sequence.num_tokens - self._counted.get(sequence.request_id, 0)
        self._counted[sequence.request_id] = sequence.num_tokens


@dataclass(frozen=True)
class _UnderWay:
    """A step that its ranks have."""

    scheduled: ScheduledBatch
    plan: StepPlan
    topology: Topology
    begin_seconds: float
    """When it was chosen."""

    @cached_property
    def coverage(self) -> tuple[int, ...]:
        """See `expected_coverage`."""
        return expected_coverage(self.plan.batch, self.topology)


def choose_replica(
    replicas: Sequence[Replica], token_ids: Sequence[int], scope: CacheScope
) -> Replica:
    """The replica for a request: the one with the least load, once it has the request too.

    What it finds in its prefix cache adds nothing, so a hit outweighs a difference in load of up to
    its own length. Among equals the lowest.
    """
    if len(replicas) == 1:
        return replicas[0]
    return min(
        replicas,
        key=lambda replica: replica.load - replica.num_hit_tokens(token_ids, scope),
    )


def _token_ids(found: Sequence[SampledToken]) -> list[int]:
    return [entry.token_id for entry in found if entry.token_id is not None]


def _failed_ids(scheduled: ScheduledBatch, sampled: Sampled) -> set[int]:
    """Requests with bad numbers in a drawn row, or in rows of prompt log-probabilities."""
    failed = {id_ for id_, found in sampled.items() if not all(entry.finite for entry in found)}
    for part in scheduled.parts:
        found = sampled.get(part.request.request_id, [])
        if _num_logprob_rows(part) and not (found and found[0].prompt_logprobs):
            failed.add(part.request.request_id)
    return failed


def _num_logprob_rows(part: ScheduledPart) -> int:
    if part.request.params.prompt_logprobs is None:
        return 0
    last = part.request.num_prompt_tokens - 1
    return max(0, min(part.num_scheduled_tokens, last - part.num_computed_tokens))
