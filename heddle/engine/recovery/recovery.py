"""What is done when ranks fail.

    note the fault --> blame --> new ranks, until some are proven --> end who is to blame --> go on
                         |           ^      |
                         |           +------+  the budget allows
        a request that ranks fail of when it runs alone
        an adapter that ranks fail of when they take it in alone
        an adapter whose files are others than those that were loaded

New ranks are proven by a step that nobody asked for before they get requests, so that a fault that
they bring along is never put down to one of these.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from heddle.config.engine import ResolvedConfig
from heddle.engine.adapters import AdapterTable, LoadedAdapter
from heddle.engine.counters import Counters
from heddle.engine.executors.base import Executor
from heddle.engine.outputs import RequestOutput
from heddle.engine.recovery.adapter_trust import AdapterTrust
from heddle.engine.recovery.canary import prove_adapter, prove_ranks
from heddle.engine.recovery.places import Places
from heddle.engine.recovery.refused import RefusedRequests
from heddle.engine.recovery.restarts import CulpritFound, Restarts
from heddle.engine.recovery.suspects import Suspects
from heddle.engine.replica import Replica, StepOutcome
from heddle.engine.request_state import RequestState
from heddle.errors import HeddleError, PlanMismatch, RankFailed, counted, quoted

log = logging.getLogger("heddle.engine")


class Engine(Protocol):
    """What a recovery asks of an engine, and does to it."""

    counters: Counters
    adapters: AdapterTable
    replicas: tuple[Replica, ...]
    resolved: ResolvedConfig

    @property
    def executor(self) -> Executor:
        """The ranks of now."""
        ...

    @property
    def open_requests(self) -> Sequence[RequestState]:
        """In the order in which they came."""
        ...

    def begin_life(self, resolved: ResolvedConfig, executor: Executor) -> None:
        """Other ranks, and empty replicas that know of no adapter; nobody is queued with them."""
        ...

    def end_failed(self, state: RequestState) -> RequestOutput | None:
        """End a request whose error is set; what it has to tell."""
        ...


class Recovery:
    """From ranks that have failed to ranks that go on.

    Args:
        restarts: makes new ranks; None: a failure ends the engine.
        num_replicas: of the engine.
        clock: monotonic seconds.
    """

    def __init__(
        self, restarts: Restarts | None, num_replicas: int, clock: Callable[[], float]
    ) -> None:
        self.since: float | None = None
        """When ranks failed that are being started anew; any thread may look."""
        self.suspects = Suspects(clock)
        self.places = Places(self.suspects)
        """Of open sequences; who of them runs is decided here."""
        self.trust = AdapterTrust(num_replicas)
        self._refused = RefusedRequests(clock)
        self._restarts = restarts
        self._clock = clock
        self._lost: dict[str, str] = {}
        """Why adapters were dropped, by name, while ranks are started."""

    def check(self, find_digest: Callable[[], bytes]) -> None:
        """Refuse a request like one that was condemned; any thread may ask.

        Raises:
            RequestError: see `RefusedRequests.check`.
        """
        self._refused.check(find_digest)

    def note_good_step(self, replica: int, outcome: StepOutcome) -> None:
        """Ranks have done a step; one without rows proves nothing but the adapters that it brought.

        Args:
            replica: whose ranks.
            outcome: of the step.
        """
        for change in outcome.adapter_changes:
            self.trust.note_taken(change, replica)
        if outcome.scheduled.parts and self._restarts is not None:
            self._restarts.note_good_step()

    def stop(self) -> None:
        """Start no ranks any more; any thread may call this."""
        if self._restarts is not None:
            self._restarts.stop()

    def run(self, failure: HeddleError, engine: Engine) -> list[RequestOutput]:
        """Have new ranks take over all that is open.

        Args:
            failure: of the ranks of now.
            engine: between two of its steps.
        Returns:
            What requests have to tell that end with it.
        Raises:
            HeddleError: the engine has to end; see `Restarts.run`.
        """
        _count_mismatch(failure, engine)
        restarts = self._restarts
        if restarts is None:
            raise failure
        began = self.since = self._clock()
        try:
            condemned = self._blame(restarts, failure, engine)
            engine.counters.count_fault()
            num_pinned = sum(replica.cache.num_pinned_blocks for replica in engine.replicas)
            prove = partial(self._prove, engine)
            restarts.run(failure, engine.resolved, engine.executor, prove)
            outputs = self._end_culprits(condemned, engine)
            if num_pinned:
                log.warning(
                    "the prefix cache is empty again, %d pinned blocks among it", num_pinned
                )
            self.places.move(engine.replicas, self._clock())
        finally:
            self.since = None
        seconds, num_open = self._clock() - began, len(engine.open_requests)
        engine.counters.count_recovery(engine.resolved.epoch, seconds, num_open)
        log.info("recovered in %.2f s: %s", seconds, _who_goes_on(num_open))
        return outputs

    def _blame(self, restarts: Restarts, failure: HeddleError, engine: Engine) -> str | None:
        """Note a fault; the request that has caused it, if that is known now."""
        number = restarts.note_fault(failure)
        self.trust.note_fault(number)
        under_way = self.places.requests_under_way(engine.replicas)
        condemned = self.suspects.note_fault(number, under_way)
        if condemned is not None:
            restarts.pin(self.suspects.faults_of(condemned))
        return condemned

    def _prove(self, engine: Engine, resolved: ResolvedConfig, executor: Executor) -> None:
        """See that new ranks work, and give them all adapters that harm nobody."""
        for name, change in engine.adapters.changed_files().items():
            self._drop(
                engine, name, f"has other files than when it was loaded ({change}); load it again"
            )
        engine.begin_life(resolved, executor)
        loaded = engine.adapters.loaded
        proven = [adapter.change for adapter in loaded if self.trust.is_proven(adapter.slot)]
        for replica in engine.replicas:
            replica.change_adapters(*proven)
        try:
            prove_ranks(engine.replicas, executor)
            for adapter in loaded:
                if not self.trust.is_proven(adapter.slot):
                    self._prove_adapter(engine, executor, adapter)
        except PlanMismatch as mismatch:
            _count_mismatch(mismatch, engine)
            raise

    def _prove_adapter(self, engine: Engine, executor: Executor, adapter: LoadedAdapter) -> None:
        try:
            prove_adapter(engine.replicas, executor, adapter.change)
        except (RankFailed, PlanMismatch) as failure:
            if isinstance(failure, PlanMismatch):
                _count_mismatch(failure, engine)
            faults = self.trust.faults_of(adapter.slot)
            self._drop(engine, adapter.name, "is dropped: ranks failed when they took it in, alone")
            raise CulpritFound(str(failure), faults) from failure
        for replica in engine.replicas:
            self.trust.note_taken(adapter.change, replica.index)

    def _drop(self, engine: Engine, name: str, why: str) -> None:
        """Forget an adapter; its requests end once new ranks are there."""
        log.error("adapter %s %s", quoted(name), why)
        self.trust.note_change(engine.adapters.drop(name))
        self._lost[name] = why

    def _end_culprits(self, condemned: str | None, engine: Engine) -> list[RequestOutput]:
        """End those that ranks fail of, and those that have lost their adapter."""
        lost, self._lost = self._lost, {}
        culprits = [state for state in engine.open_requests if state.request_id == condemned]
        digests = {state.digest() for state in culprits}
        for digest in digests:
            self._refused.add(digest)
        outputs = []
        for state in engine.open_requests:
            if digests and state.digest() in digests:
                log.error(
                    "request %s was computed alone, and ranks failed once more: it has ended, and "
                    "others like it are refused for a while",
                    state.request_id,
                )
                state.note_condemned()
                engine.counters.count_condemned()
            elif state.adapter in lost:
                state.note_lost_adapter(lost[state.adapter])
            else:
                continue
            output = engine.end_failed(state)
            if output is not None:
                outputs.append(output)
        return outputs


def _count_mismatch(failure: HeddleError, engine: Engine) -> None:
    if isinstance(failure, PlanMismatch):
        engine.counters.count_mismatch(failure.kind)


def _who_goes_on(num_requests: int) -> str:
    return f"{counted(num_requests, 'request')} {'goes' if num_requests == 1 else 'go'} on"
