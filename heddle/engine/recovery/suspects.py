"""Which request may be the cause of failing ranks, found out by trying.

    fault 1   A B C in flight      each is suspected once
    fault 2   A B                  A and B twice: they are replayed alone, one at a time
    alone     A draws a token      it was not A
    alone     B, and ranks fail    it was B: condemned
              C and all others     wait until the trials are over

A request is on trial until each of its open sequences has drawn one more token: whatever was being
computed when ranks failed has then been computed again, without company. A suspicion that no other
fault has confirmed within ten minutes is forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable

from heddle.engine.recovery.refused import REFUSED_SECONDS

MAX_SUSPICION = 1
"""Faults that a request may be in flight of before it is tried alone."""
SUSPECTED_SECONDS = REFUSED_SECONDS
"""How long a fault counts against those that were in flight of it."""


class Suspects:
    """Suspicions and trials; requests are known by their ids.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._faults: dict[str, dict[int, float]] = {}
        """By request, the numbers of its faults and when they were."""
        self._queue: deque[str] = deque()
        self._owing: set[int] = set()
        self.has_moved = False
        """Another set of requests may run than was seated last."""

    @property
    def on_trial(self) -> str | None:
        """The request that runs alone now; None: all may run."""
        return self._queue[0] if self._queue else None

    def may_run(self, request_id: str) -> bool:
        """Whether a request is computed now, or waits for the end of the trials."""
        return not self._queue or self._queue[0] == request_id

    def faults_of(self, request_id: str) -> frozenset[int]:
        """Faults that it is suspected of."""
        return frozenset(self._faults.get(request_id, ()))

    def note_fault(self, number: int, in_flight: Collection[str]) -> str | None:
        """Ranks have failed.

        Args:
            number: of the fault.
            in_flight: requests in the steps that have not ended, oldest first.
        Returns:
            The request that was alone on trial, hence the cause; to be forgotten once it has ended.
        """
        self._forget_old_faults()
        for request_id in in_flight:
            self._faults.setdefault(request_id, {})[number] = self._clock()
        if self._queue:
            return self._queue[0] if set(in_flight) == {self._queue[0]} else None
        self._queue += [
            request_id for request_id, faults in self._faults.items() if len(faults) > MAX_SUSPICION
        ]
        return None

    def seat(self, sequence_ids: Iterable[int]) -> None:
        """Those who may run are queued now.

        Args:
            sequence_ids: open sequences of the request on trial; of none without a trial.
        """
        self._owing = set(sequence_ids)
        self.has_moved = False

    def note_token(self, sequence_id: int) -> None:
        """A sequence has drawn a token."""
        if self._owing:
            self._owing.discard(sequence_id)
            if not self._owing:
                self._end_trial()

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._faults.pop(request_id, None)
        if request_id == self.on_trial:
            self._end_trial()
        elif request_id in self._queue:
            self._queue.remove(request_id)

    def _end_trial(self) -> None:
        self._faults.pop(self._queue.popleft(), None)
        self._owing.clear()
        self.has_moved = True

    def _forget_old_faults(self) -> None:
        begin = self._clock() - SUSPECTED_SECONDS
        for request_id, faults in list(self._faults.items()):
            recent = {number: time for number, time in faults.items() if time > begin}
            if recent:
                self._faults[request_id] = recent
            else:
                del self._faults[request_id]
