"""Runs of steps in which nothing is decided: the same requests decode, one row each, step by step.

    quiet      a step of decode rows alone, of all that run; none ended and none was preempted
    after it   nobody who waits could start: each was looked at, and blocks only get fewer
    a run      the steps that follow, until a request is about to end or a block may be missing

An arrival ends a run, no other thing does. A run is priced at once; what it does to blocks is done
when it is asked for, in the very order in which single steps would do it: at the end of a step the
blocks that are full become findable, then those whose next token needs a block get one. Steps in
between touch no block at all, and are skipped.

Models with windows or recurrent states give blocks back and take snapshots in other steps too; they
have no quiet runs.

Legend: `V` virtual block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from heddle.kvcache.manager import KVCacheManager
from heddle.scheduler.batch import ScheduledBatch
from heddle.scheduler.request import Request
from heddle.simulator.prices import Clock, Prices
from heddle.simulator.tokens import RunTokens

MAX_STEPS = 512
"""Of a run; the next one goes on from there."""
_LEAST_STEPS = 2


class Done(NamedTuple):
    """Steps that were accounted for."""

    num_steps: int
    gaps: NDArray[np.float64]
    """[num_steps] seconds between the tokens of each request."""
    rows: NDArray[np.float64]
    """[num_steps] that each rank computed."""


class QuietRun:
    """Steps of the same decode rows, from one time on.

    Args:
        requests: in the order in which steps have them.
        cache: whose blocks they own.
        now: when the first step begins.
        prices: of the steps.
    """

    def __init__(
        self, requests: Sequence[Request], cache: KVCacheManager, now: float, prices: Prices
    ) -> None:
        self.requests = list(requests)
        self._cache, self._unit = cache, cache.virtual_block_size
        self._rows = prices[:, 2]
        # Added up one by one, as single steps are.
        self._times = np.add.accumulate(np.concatenate(([now], prices[:, 0])))
        self._begins = [request.num_computed_tokens for request in self.requests]
        self._by_phase: dict[int, list[int]] = {}
        for at, begin in enumerate(self._begins):
            self._by_phase.setdefault(-begin % self._unit, []).append(at)
        self._done = 0

    @property
    def count(self) -> int:
        """Steps."""
        return len(self._rows)

    @property
    def end(self) -> float:
        """Of the last step."""
        return float(self._times[-1])

    @property
    def present(self) -> float:
        """End of the last step that was accounted for."""
        return float(self._times[self._done])

    def num_ended(self, now: float) -> int:
        """Steps that have ended by then."""
        return int(np.searchsorted(self._times, now, side="right")) - 1

    def num_ended_before(self, now: float) -> int:
        """Steps that have ended, those that end just then not among them."""
        return max(int(np.searchsorted(self._times, now, side="left")) - 1, self._done)

    def num_tokens_since(self, now: float) -> int:
        """Tokens of steps that have ended and were not accounted for."""
        return (self.num_ended(now) - self._done) * len(self.requests)

    def apply(self, upto: int) -> Done:
        """Account for the first `upto` steps, those of before left out."""
        first, self._done = self._done, upto
        count = upto - first
        for request in self.requests if count else ():
            tokens = cast("RunTokens", cast("object", request.token_ids))
            tokens.extend(count)
            request.output_token_ids += [tokens.answer] * count
        self._move_blocks(first, upto)
        for request, begin in zip(self.requests if count else (), self._begins, strict=False):
            request.num_computed_tokens = begin + upto
            self._cache.grow(request.blocks, begin + upto)
        return Done(count, np.diff(self._times[first : upto + 1]), self._rows[first:upto])

    def _move_blocks(self, first: int, upto: int) -> None:
        """What steps [first, upto) do to blocks, and what the step after them takes."""
        for step in range(first, upto + 1):
            members = self._by_phase.get(step % self._unit, ())
            if step > first:  # the end of the step before
                for at in members:
                    request, stored = self.requests[at], self._begins[at] + step
                    self._cache.commit(request.blocks, request.token_ids, stored)
            if step < self.count:
                for at in members:
                    self._cache.grow(self.requests[at].blocks, self._begins[at] + step + 1)


class QuietRuns:
    """Notices when a run may begin.

    Args:
        cache: of the replica.
        clock: what steps take.
    """

    def __init__(self, cache: KVCacheManager, clock: Clock) -> None:
        self._cache, self._clock = cache, clock
        units = {spec.unit for spec in cache.groups}
        is_plain = all(spec.visibility.is_full for spec in cache.groups) and not cache.has_states
        self._may_run = is_plain and len(units) == 1
        self._requests: list[Request] = []
        self._has_arrivals = False

    def disturb(self) -> None:
        """A request has come that no step has looked at."""
        self._requests, self._has_arrivals = [], True

    def look(self) -> None:
        """A step is about to be chosen, from all that are there."""
        self._requests, self._has_arrivals = [], False

    def note(self, batch: ScheduledBatch, num_open: int) -> None:
        """A step has ended.

        Args:
            batch: of the step.
            num_open: requests that run now.
        """
        is_settled = self._may_run and not self._has_arrivals and not batch.preempted
        if not is_settled or len(batch.parts) != num_open:  # one has ended, or some did not run
            return
        if all(part.samples and part.num_scheduled_tokens == 1 for part in batch.parts):
            self._requests = [part.request for part in batch.parts]

    def begin(self, now: float) -> QuietRun | None:
        """The run that begins now; None if there is none of at least two steps."""
        requests = self._requests
        if not requests:
            return None
        count = min(r.max_output_tokens - len(r.output_token_ids) for r in requests) - 1
        if count < _LEAST_STEPS:
            return None
        stored = np.array([r.num_computed_tokens for r in requests], dtype=np.int64)
        count = self._with_blocks(requests, stored, min(count, MAX_STEPS))
        if count < _LEAST_STEPS:
            return None
        keys = int(stored.sum()) + len(requests) * np.arange(count, dtype=np.int64)
        return QuietRun(requests, self._cache, now, self._clock.decodes(len(requests), keys))

    def _with_blocks(
        self, requests: Sequence[Request], stored: NDArray[np.int64], count: int
    ) -> int:
        """Steps, at most `count`, for whose new tokens there are blocks."""
        unit, num_groups = self._cache.virtual_block_size, len(self._cache.groups)
        held = np.array([len(r.block_tables[0]) for r in requests], dtype=np.int64)
        available = self._cache.num_available_blocks

        def fits(steps: int) -> bool:
            missing = np.maximum(-(-(stored + steps) // unit) - held, 0)
            return int(missing.sum()) * num_groups <= available

        if fits(count):
            return count
        low, high = 0, count  # `low` fits, `high` does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low
