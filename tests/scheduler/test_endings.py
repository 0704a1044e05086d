"""A request ends once; its blocks go when no rank may write them any more."""

from __future__ import annotations

import pytest

from heddle.scheduler.batch import ScheduledBatch, ScheduledPart
from heddle.scheduler.endings import Endings
from heddle.scheduler.flight import Flight
from heddle.scheduler.queues import Queues
from heddle.scheduler.request import Request
from tests.scheduler.harness import Engine

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


class Bench:
    """Requests that run and have computed their prompt, of which some are in a step."""

    def __init__(self, count: int, *, in_step: tuple[int, ...] = ()) -> None:
        self.engine = Engine(ranks=1, block_size=4)
        self.cache = self.engine.cache
        self.queues, self.flight = Queues(), Flight()
        self.endings = Endings(self.queues, self.flight, self.cache)
        self.requests = [self._run([*PROMPT, at]) for at in range(count)]
        if in_step:
            parts = tuple(ScheduledPart(self.requests[at], 10, 1, True) for at in in_step)
            self.flight.submit(ScheduledBatch(parts))

    def _run(self, prompt: list[int]) -> Request:
        request = self.engine.add(prompt, 4)
        self.queues.add(request)
        self.queues.start(request)
        self.cache.start(request.blocks, self.cache.lookup(request.blocks, prompt), len(prompt))
        request.num_computed_tokens = len(prompt)
        self.cache.commit(request.blocks, prompt, len(prompt))
        return request

    @property
    def live(self) -> int:
        return sum(bool(request.blocks.block_tables[0]) for request in self.requests)

    def findable(self) -> int:
        probe = [*PROMPT, 0, 0]
        return self.cache.lookup(self.cache.new_sequence(), probe).num_tokens


def test_blocks_go_back_at_once_and_what_they_hold_stays_findable() -> None:
    bench = Bench(2)
    bench.endings.finish(bench.requests[0], "stop", 7)
    first, second = bench.requests
    assert (first.finish_reason, first.stop_reason, second.finish_reason) == ("stop", 7, None)
    assert (bench.live, bench.findable(), bench.queues.running) == (1, 10, [second])
    bench.cache.audit([second.blocks])


def test_blocks_of_a_request_in_a_step_stay_until_it_has_ended() -> None:
    bench = Bench(1, in_step=(0,))
    (request,) = bench.requests
    bench.endings.finish(request, "abort", None)
    assert (request.is_finished, bench.live) == (True, 1)
    bench.flight.end_head()
    bench.endings.release(request)
    assert bench.live == 0


@pytest.mark.parametrize("in_step", [(), (0,)], ids=["idle", "under way"])
def test_nothing_of_a_failed_request_is_found_again(in_step: tuple[int, ...]) -> None:
    bench = Bench(1, in_step=in_step)
    (request,) = bench.requests
    bench.endings.fail(request)
    assert request.finish_reason == "error"
    if in_step:
        assert (bench.live, bench.endings.is_distrusted(request)) == (1, True)
        bench.flight.end_head()
        bench.endings.fail(request)
    assert (bench.live, bench.endings.is_distrusted(request)) == (0, False)
    assert bench.findable() == 0
    assert len(bench.cache.take_edits().wiped_blocks) == 3  # 10 tokens in blocks of 4
    bench.cache.audit([])


def test_those_that_fail_together_may_stand_anywhere() -> None:
    bench = Bench(4, in_step=(1,))
    ended_before = bench.requests[2]
    bench.endings.finish(ended_before, "length", None)
    bench.endings.fail_all({0, 1, 2, 99})
    assert [r.finish_reason for r in bench.requests] == ["error", "error", "length", None]
    assert bench.endings.is_distrusted(bench.requests[1])
    assert bench.live == 2


def test_one_that_left_during_its_step_is_distrusted_with_its_siblings() -> None:
    bench = Bench(1, in_step=(0,))
    (request,) = bench.requests
    bench.endings.finish(request, "abort", None)
    bench.endings.fail_all({0})
    assert (request.finish_reason, bench.endings.is_distrusted(request)) == ("abort", True)
