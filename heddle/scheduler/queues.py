"""Where each open request stands: waiting or running, both in order of arrival."""

from __future__ import annotations

from bisect import insort

from heddle.errors import RequestError
from heddle.scheduler.request import FinishReason, Request, RequestStatus


class Queues:
    """All open requests of a scheduler."""

    def __init__(self) -> None:
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

    def check_new(self, request_id: int) -> None:
        """Refuse an id that is in use.

        Raises:
            RequestError: it is.
        """
        if request_id in self._requests:
            raise RequestError(f"request id {request_id} is in use; ids are given out once")

    def add(self, request: Request) -> None:
        """A new request waits behind all others."""
        request.arrival, self._num_arrived = self._num_arrived, self._num_arrived + 1
        request.status, request.num_computed_tokens = RequestStatus.WAITING, 0
        self._requests[request.request_id] = request
        self.waiting.append(request)

    def start(self, request: Request) -> None:
        """A waiting request runs."""
        self.waiting.remove(request)
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=_arrival)

    def preempt(self, request: Request) -> None:
        """A running request waits again, its tokens kept."""
        self.running.remove(request)
        request.num_lost_tokens += request.num_computed_tokens
        request.num_preemptions += 1
        request.num_computed_tokens = 0
        request.draft_token_ids = ()
        request.status = RequestStatus.WAITING
        insort(self.waiting, request, key=_arrival)

    def retire(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        """A request has ended; what it owns follows."""
        queue = self.waiting if request.status is RequestStatus.WAITING else self.running
        queue.remove(request)
        del self._requests[request.request_id]
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason

    def audit(self) -> None:
        """Check that each open request stands in one queue.

        Raises:
            AssertionError: names the ids.
        """
        queued = sorted(request.request_id for request in self.everyone())
        if queued != sorted(self._requests):
            raise AssertionError(f"queued {queued}, known {sorted(self._requests)}")


def _arrival(request: Request) -> int:
    return request.arrival
