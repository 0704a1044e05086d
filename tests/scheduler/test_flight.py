from __future__ import annotations

from heddle.scheduler.batch import ScheduledBatch, ScheduledPart
from heddle.scheduler.flight import Flight
from tests.scheduler.harness import Engine


def test_batches_end_in_order_and_free_their_requests():
    engine = Engine()
    requests = [engine.add([at, at + 1], 2) for at in range(3)]
    first, second = (
        ScheduledBatch(tuple(ScheduledPart(r, 0, 2, samples) for r in part))
        for part, samples in ((requests[:2], True), (requests[2:], False))
    )
    flight = Flight()
    assert (flight.head, len(flight)) == (None, 0)
    flight.submit(first)
    flight.submit(second)
    assert (flight.head, len(flight), flight.num_partial) == (first, 2, 1)
    assert [request in flight for request in requests] == [True, True, True]
    assert list(flight.requests()) == requests
    flight.end_head()
    assert [request in flight for request in requests] == [False, False, True]
    assert flight.head is second
