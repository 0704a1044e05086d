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
