"""A fake executor that fails where a test wants it to, and those that come after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from heddle.config import ResolvedConfig
from heddle.engine.driver import Driver
from heddle.engine.recovery.budget import RestartBudget
from heddle.engine.recovery.canary import FIRST_ID
from heddle.engine.recovery.restarts import Restarts
from heddle.errors import HeddleError, RankFailed
from heddle.step.batch import GlobalBatch, RankReply
from tests.support.fake_executor import FakeExecutor

PLACES = ("submit", "first_done", "collect", "coverage", "start")


@dataclass
class World:
    """What is to fail next, and what has."""

    resolved: ResolvedConfig
    poison: int | None = None
    """Token of whose row ranks die."""
    due: list[str] = field(default_factory=list)
    """Places of failures, the next one first; `start` fails the next start."""
    error: type[HeddleError] = RankFailed
    seen: list[tuple[str, frozenset[int]]] = field(default_factory=list)
    """(place, sequences of requests in flight) of each failure."""
    has_good_step: bool = True
    """One of requests has ended since ranks last disagreed; they do not disagree twice in a row."""
    made: list[FailingExecutor] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    """Of `FakeExecutor`."""

    def create(self, resolved: ResolvedConfig) -> FailingExecutor:
        """The executor of an epoch."""
        assert all(executor.is_closed for executor in self.made), "one at a time"
        assert resolved == replace(self.resolved, epoch=len(self.made))
        self.made.append(FailingExecutor(resolved, self))
        return self.made[-1]

    def driver(self, max_restarts: int = 1000, **options: Any) -> Driver:
        """One over executors of this world."""
        clock = options.get("clock", lambda: 0.0)
        first = self.create(self.resolved)
        restarts = Restarts(self.create, RestartBudget(max_restarts, clock))
        tokenizer = options.pop("tokenizer", None)
        return Driver(self.resolved, first, tokenizer, restarts=restarts, **options)


class FailingExecutor(FakeExecutor):
    """Closed by its first failure, as real ones are."""

    def __init__(self, resolved: ResolvedConfig, world: World) -> None:
        super().__init__(resolved, **world.options)
        self._world = world
        self._epoch = resolved.epoch
        self._num_begun: dict[int, int] = {}

    def start(self) -> None:
        self._fail_if_due("start")

    def submit(self, batches: Mapping[int, tuple[GlobalBatch, int]]) -> None:
        assert not self.is_closed, "a closed executor runs nothing"
        for replica, (batch, _) in batches.items():
            assert batch.epoch == self._epoch
            assert batch.step == self._num_begun.get(replica, 0)
            self._num_begun[replica] = batch.step + 1
        self._fail_if_due("submit", batches)
        super().submit(batches)

    def first_done(self) -> int:
        self._fail_if_due("first_done")
        return super().first_done()

    def collect(self, replica: int) -> tuple[RankReply, ...]:
        self._fail_if_due("collect")
        batch = self._queues[replica][0]
        requests = batch[0].requests
        if any(self._world.poison in request.token_ids for request in requests):
            self._fail("poison")
        replies = super().collect(replica)
        if self._is_due("coverage") and self._world.has_good_step:
            self._world.has_good_step = False
            self._note("coverage", {replica: batch})
            wrong = tuple(word ^ 1 for word in replies[0].coverage)
            return (msgspec.structs.replace(replies[0], coverage=wrong), *replies[1:])
        self._world.has_good_step |= any(request.request_id < FIRST_ID for request in requests)
        return replies

    def _is_due(self, place: str) -> bool:
        return bool(self._world.due) and self._world.due[0] == place

    def _fail_if_due(
        self, place: str, batches: Mapping[int, tuple[GlobalBatch, int]] | None = None
    ) -> None:
        if self._is_due(place):
            self._fail(place, batches)

    def _fail(
        self, place: str, batches: Mapping[int, tuple[GlobalBatch, int]] | None = None
    ) -> None:
        self._note(place, batches)
        self.close()
        raise self._world.error(f"rank 1 failed at {place}\nits stacks")

    def _note(
        self, place: str, batches: Mapping[int, tuple[GlobalBatch, int]] | None = None
    ) -> None:
        if self._is_due(place):
            self._world.due.pop(0)
        queued = [batch for queue in self._queues.values() for batch, _ in queue]
        queued += [batch for batch, _ in (batches or {}).values()]
        ids = {request.request_id for batch in queued for request in batch.requests}
        self._world.seen.append((place, frozenset(id_ for id_ in ids if id_ < FIRST_ID)))
