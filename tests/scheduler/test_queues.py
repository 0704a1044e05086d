from __future__ import annotations

import pytest

from heddle.errors import RequestError
from heddle.scheduler.queues import Queues
from heddle.scheduler.request import RequestStatus
from tests.scheduler.harness import Engine


def test_a_preempted_request_returns_to_its_place_in_the_order_of_arrival():
    engine = Engine()
    requests = [engine.add([at], 2) for at in range(4)]
    queues = Queues()
    for request in requests:
        queues.add(request)
    for request in (requests[2], requests[0], requests[1]):
        queues.start(request)
    assert (queues.running, queues.waiting) == (requests[:3], requests[3:])
    requests[1].num_computed_tokens = 5
    requests[1].draft_token_ids = (1, 2)
    queues.preempt(requests[1])
    assert queues.waiting == [requests[1], requests[3]]
    assert (requests[1].num_lost_tokens, requests[1].num_computed_tokens) == (5, 0)
    assert requests[1].draft_token_ids == (), "a guess is for the next step only"
    queues.audit()
    queues.retire(requests[1], "abort", None)
    assert (requests[1].status, len(queues)) == (RequestStatus.FINISHED, 3)
    assert queues.everyone() == (requests[3], requests[0], requests[2])
    with pytest.raises(RequestError, match="request id 0 is in use"):
        queues.check_new(0)
    queues.check_new(1)
    queues.running.clear()
    with pytest.raises(AssertionError, match=r"queued \[3\], known \[0, 2, 3\]"):
        queues.audit()


def test_priorities_come_before_arrival_where_the_policy_asks_for_it():
    engine = Engine()
    requests = [engine.add([at], 2, priority=priority) for at, priority in enumerate([1, 0, 1, -3])]
    queues = Queues("priority")
    for request in requests:
        queues.add(request)
    assert [request.request_id for request in queues.waiting] == [3, 1, 0, 2]
    assert [queues.num_ahead(request) for request in requests] == [2, 1, 3, 0]
    for request in requests[:3]:
        queues.start(request)
    assert [request.request_id for request in queues.running] == [1, 0, 2]
    queues.preempt(requests[0])
    assert [request.request_id for request in queues.waiting] == [3, 0]
    queues.audit()
    queues.waiting.reverse()
    with pytest.raises(AssertionError, match=r"out of order: \[0, 3\]"):
        queues.audit()
