"""Where each open request stands: waiting or running, both in one order.

    fcfs       arrival
    priority   (priority, arrival): lower numbers first, equals as they came

A request keeps its place for life: one that was preempted returns to it.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from heddle.config.scheduler import SchedulingPolicy
from heddle.errors import RequestError
from heddle.scheduler.request import FinishReason, Request, RequestStatus


class Queues:
    """All open requests of a scheduler.

    Args:
        policy: of the order.
    """

    def __init__(self, policy: SchedulingPolicy = "fcfs") -> None:
        self._has_priorities = policy == "priority"
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._requests: dict[int, Request] = {}
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request_id: int) -> Request | None:
        """An open request, or None."""
        return self._requests.get(request_id)

    def everyone(self) -> tuple[Request, ...]:
        """All open requests."""
        return (*self.waiting, *self.running)

    def order(self, request: Request) -> tuple[int, int]:
        """By this, smaller ones come first."""
        return (request.priority if self._has_priorities else 0, request.arrival)

    def num_ahead(self, request: Request) -> int:
        """Waiting requests that come before a request."""
        return bisect_left(self.waiting, self.order(request), key=self.order)

    def check_new(self, request_id: int) -> None:
        """Refuse an id that is in use.

        Raises:
            RequestError: it is.
        """
        if request_id in self._requests:
            raise RequestError(f"request id {request_id} is in use; ids are given out once")

    def add(self, request: Request) -> None:
        """A new request waits behind those that come before it."""
        request.arrival, self._num_arrived = self._num_arrived, self._num_arrived + 1
        request.status, request.num_computed_tokens = RequestStatus.WAITING, 0
        self._requests[request.request_id] = request
        self._enqueue(request)

    def start(self, request: Request) -> None:
        """A waiting request runs."""
        self.waiting.remove(request)
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=self.order)

    def preempt(self, request: Request) -> None:
        """A running request waits again, its tokens kept."""
        self.running.remove(request)
        request.num_lost_tokens += request.num_computed_tokens
        request.num_preemptions += 1
        request.num_computed_tokens = 0
        request.draft_token_ids = ()
        request.status = RequestStatus.WAITING
        self._enqueue(request)

    def withdraw(self, request: Request) -> None:
        """An open request is no longer here, its tokens kept; what it owns is gone already."""
        queue = self.waiting if request.status is RequestStatus.WAITING else self.running
        queue.remove(request)
        del self._requests[request.request_id]
        request.status = RequestStatus.WAITING

    def retire(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        """A request has ended; what it owns follows."""
        queue = self.waiting if request.status is RequestStatus.WAITING else self.running
        queue.remove(request)
        del self._requests[request.request_id]
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason

    def audit(self) -> None:
        """Check that each open request stands in one queue, and in its place.

        Raises:
            AssertionError: names the ids.
        """
        queued = sorted(request.request_id for request in self.everyone())
        if queued != sorted(self._requests):
            raise AssertionError(f"queued {queued}, known {sorted(self._requests)}")

        for queue in (self.waiting, self.running):
            if queue != sorted(queue, key=self.order):
                raise AssertionError(f"out of order: {[r.request_id for r in queue]}")

    def _enqueue(self, request: Request) -> None:
        request.wait_reason = "next_step"
        insort(self.waiting, request, key=self.order)
