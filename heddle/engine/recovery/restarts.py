"""New ranks in the place of those that failed, as often as the budget allows.

    fault --> close the old executor --> epoch + 1 --> create, start, prove --> its steps
                                             ^                 |
                                             +----- fault -----+      counts once more

Every failure is of the world as a whole: the ranks of one replica hold groups with those of the
others, and nobody can tell a rank that is well from one that waits for a dead peer.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Collection

from heddle.config.engine import ResolvedConfig
from heddle.engine.executors.base import Executor
from heddle.engine.recovery.budget import RestartBudget
from heddle.errors import HeddleError, PlanMismatch, RankFailed

log = logging.getLogger("heddle.engine")

OF_RANKS = (RankFailed, PlanMismatch)
"""Failures that new ranks may mend; any other is a fault of the driver, a setting or a file."""


class CulpritFound(RankFailed):
    """New ranks failed of something that has been taken away since.

    Attributes:
        faults: numbers of earlier faults that were of the same.
    """

    def __init__(self, message: str, faults: Collection[int] = ()) -> None:
        super().__init__(message)
        self.faults = frozenset(faults)


class Restarts:
    """Starts ranks anew, or says that it is enough.

    Args:
        create: an executor that is not started, for a configuration of the next epoch.
        budget: how many faults are followed by new ranks.
        closing: set when the engine is being closed, to be seen by executors that start; None: one
            of its own.
    """

    def __init__(
        self,
        create: Callable[[ResolvedConfig], Executor],
        budget: RestartBudget,
        closing: threading.Event | None = None,
    ) -> None:
        self._create = create
        self._budget = budget
        self._closing = closing or threading.Event()
        self._has_mismatch = False

    def stop(self) -> None:
        """Start no ranks any more; any thread may call this."""
        self._closing.set()

    def note_good_step(self) -> None:
        """Ranks have done a step of requests."""
        self._has_mismatch = False
        self._budget.note_good_step()

    def note_fault(self, failure: HeddleError) -> int:
        """Ranks have failed; the number of the fault.

        Raises:
            PlanMismatch: ranks that have just been made anew disagree again, before they did a
                single step of requests: the next ones would, too.
        """
        if isinstance(failure, PlanMismatch):
            if self._has_mismatch:
                log.error("new ranks disagree as the old ones did; they are not started anew")
                raise failure
            self._has_mismatch = True
        number = self._budget.note_fault()
        if isinstance(failure, CulpritFound):
            self._budget.pin(failure.faults | {number})
        return number

    def pin(self, faults: Collection[int]) -> None:
        """These faults were one request's; see `RestartBudget.pin`."""
        self._budget.pin(faults)

    def run(
        self,
        failure: HeddleError,
        resolved: ResolvedConfig,
        executor: Executor,
        prove: Callable[[ResolvedConfig, Executor], None],
    ) -> None:
        """Close an executor, and start successors until one of them is proven.

        Args:
            failure: of the old one, noted.
            resolved: that the old one ran.
            executor: the old one.
            prove: given each new one that has started, and what it runs; raises if its ranks fail.
        Raises:
            RankFailed, PlanMismatch: the last failure, where the budget is spent or the engine is
                being closed.
            ConfigError, ModelFileError, UnsupportedError: what once could be started cannot any
                more, or must not.
        """
        while True:
            executor.close()
            self._check(failure)
            resolved = dataclasses.replace(resolved, epoch=resolved.epoch + 1)
            try:
                executor = self._create(resolved)
                executor.start()
                prove(resolved, executor)
            except OF_RANKS as another:
                failure = another
                executor.close()
                self.note_fault(another)
            except BaseException:
                executor.close()
                raise
            else:
                # A step that nobody asked for says that ranks can work, not that they agree about
                # the step that the last ones disagreed about.
                self._budget.note_good_step()
                return

    def _check(self, failure: HeddleError) -> None:
        """Log a failure, and raise it if it was one too many."""
        budget = self._budget
        first, _, detail = str(failure).partition("\n")
        if self._closing.is_set():
            raise RankFailed(
                f"{first}; ranks are not started anew, for the engine is being closed"
            ) from failure
        if budget.is_spent:
            log.error(
                "%s; ranks failed %d times within %.0f s, max_restarts is %d",
                first,
                budget.num_counted,
                budget.window_seconds,
                budget.max_restarts,
            )
            raise failure
        log.warning(
            "%s; ranks are started anew (%d of %d restarts)",
            first,
            budget.num_counted,
            budget.max_restarts,
        )
        if detail:
            log.info("what is known of it: %s", detail)
