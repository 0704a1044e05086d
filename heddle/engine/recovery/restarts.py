"""New ranks in the place of those that failed, as often as the budget allows.

    fault --> close the old executor --> epoch + 1 --> create, start --> its steps
                                             ^                |
                                             +---- fault -----+      counts once more

Every failure is of the world as a whole: the ranks of one replica hold groups with those of the
others, and nobody can tell a rank that is well from one that waits for a dead peer.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection

from heddle.config.engine import ResolvedConfig
from heddle.engine.executors.base import Executor
from heddle.engine.recovery.budget import RestartBudget
from heddle.errors import HeddleError, PlanMismatch, RankFailed

log = logging.getLogger("heddle.engine")

OF_RANKS = (RankFailed, PlanMismatch)
"""Failures that new ranks may mend; any other is a fault of the driver, a setting or a file."""


class Restarts:
    """Starts ranks anew, or says that it is enough.

    Args:
        create: an executor that is not started, for a configuration of the next epoch.
        budget: how many faults are followed by new ranks.
    """

    def __init__(self, create: Callable[[ResolvedConfig], Executor], budget: RestartBudget) -> None:
        self._create = create
        self._budget = budget
        self._has_mismatch = False

    def note_good_step(self) -> None:
        """Ranks have done a step."""
        self._has_mismatch = False
        self._budget.note_good_step()

    def note_fault(self, failure: HeddleError) -> int:
        """Ranks have failed; the number of the fault.

        Raises:
            PlanMismatch: ranks that have just been made anew disagree again, before they did a
                single step: the next ones would, too.
        """
        if isinstance(failure, PlanMismatch):
            if self._has_mismatch:
                log.error("new ranks disagree as the old ones did; they are not started anew")
                raise failure
            self._has_mismatch = True
        return self._budget.note_fault()

    def pin(self, faults: Collection[int]) -> None:
        """These faults were one request's; see `RestartBudget.pin`."""
        self._budget.pin(faults)

    def run(
        self, failure: HeddleError, resolved: ResolvedConfig, executor: Executor
    ) -> tuple[ResolvedConfig, Executor]:
        """Close an executor and start its successor.

        Args:
            failure: of the old one, noted.
            resolved: that the old one ran.
            executor: the old one.
        Returns:
            What runs now, and on which ranks.
        Raises:
            RankFailed, PlanMismatch: the last failure, where the budget is spent.
            ConfigError, ModelFileError, UnsupportedError: what once could be started cannot any
                more.
        """
        while True:
            executor.close()
            self._check(failure)
            resolved = dataclasses.replace(resolved, epoch=resolved.epoch + 1)
            try:
                executor = self._create(resolved)
                executor.start()
            except OF_RANKS as another:
                failure = another
                self._budget.note_fault()
            else:
                return resolved, executor

    def _check(self, failure: HeddleError) -> None:
        """Log a failure, and raise it if it was one too many."""
        budget = self._budget
        first, _, detail = str(failure).partition("\n")
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
