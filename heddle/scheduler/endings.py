"""How requests end, and when what they own goes back.

in no step          blocks go back at once
its step under way  the request ends now, its blocks stay until the step has ended: ranks may
                    still write them
bad numbers         nothing of it may be found or read again: blocks are wiped, not kept
"""

from __future__ import annotations

from collections.abc import Collection

from heddle.kvcache.manager import KVCacheManager
from heddle.scheduler.flight import Flight
from heddle.scheduler.queues import Queues
from heddle.scheduler.request import FinishReason, Request


class Endings:
    """Takes requests out of the queues and their blocks back.

    Args:
        queues: of the scheduler.
        flight: its steps under way.
        cache: its pool.
    """

    def __init__(self, queues: Queues, flight: Flight, cache: KVCacheManager) -> None:
        self._queues, self._flight, self._cache = queues, flight, cache
        self._distrusted: set[int] = set()  # ended with bad numbers while a step was under way

    def is_distrusted(self, request: Request) -> bool:
        """It has failed while its step was under way."""
        return request.request_id in self._distrusted

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        """End an open request; what it computed stays findable until evicted."""
        self._queues.retire(request, reason, stop_reason)
        if request not in self._flight:
            self.release(request)

    def release(self, request: Request, *, has_current_state: bool = True) -> None:
        """Take back what a request in no step owns.

        Args:
            request: ended, or about to be preempted.
            has_current_state: False: a step that was not accounted for has moved its state on.
        """
        self._cache.release(
            request.blocks,
            request.token_ids,
            request.num_computed_tokens,
            has_current_state=has_current_state,
        )

    def fail(self, request: Request) -> None:
        """End a request whose numbers went bad; called again once its step has ended."""
        if not request.is_finished:
            self._queues.retire(request, "error", None)
        if request in self._flight:
            self._distrusted.add(request.request_id)
        else:
            self._distrusted.discard(request.request_id)
            self._cache.quarantine(request.blocks)

    def fail_all(self, request_ids: Collection[int]) -> None:
        """`fail` for those of the ids that are open or under way."""
        if request_ids:
            for request in (*self._flight.requests(), *self._queues.everyone()):
                if request.request_id in request_ids:
                    self.fail(request)
