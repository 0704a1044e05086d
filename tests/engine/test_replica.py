"""One replica by itself: its load, its steps in order, and who ends with whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.config import ParallelConfig, SamplingParams
from heddle.engine.replica import Replica, choose_replica
from heddle.errors import PlanMismatch
from heddle.kvcache.keys import CacheScope
from heddle.scheduler.request import Request
from heddle.step.topology import Topology
from tests.support.fake_executor import EOS, FakeExecutor, resolved_config, toy_greedy


class Bench:
    """A replica and ranks that answer it."""

    def __init__(self, **config: Any) -> None:
        resolved = resolved_config(**config)
        self.topology = Topology.from_resolved(resolved)
        self.now = 0.0
        self.replica = Replica(0, resolved, self.topology, clock=lambda: self.now)
        self.executor = FakeExecutor(resolved, is_poisoned=lambda tokens: tokens[0] == 60)

    def admit(self, id_: int, prompt: Sequence[int], count: int = 4, **params: Any) -> Request:
        request = Request(
            request_id=id_,
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(temperature=0.0, **params),
            max_output_tokens=count,
            kv_layout=self.replica.cache.layout,
            eos_token_ids=(EOS,),
        )
        self.replica.admit(request, ())
        return request

    def begin(self) -> bool:
        begun = self.replica.begin_step()
        if begun is None:
            return False
        self.executor.submit({0: begun})
        return True

    def end(self, siblings: Any = lambda id_: {id_}) -> Any:
        outcome = self.replica.end_step(self.executor.collect(0), siblings)
        for part in outcome.scheduled.parts:
            if part.request.is_finished:
                self.replica.forget(part.request)
        self.replica.after_step(outcome.scheduled)
        return outcome


PROMPTS = st.lists(st.lists(st.integers(2, 9), min_size=1, max_size=20), min_size=1, max_size=5)


@settings(max_examples=25)
@given(PROMPTS, st.integers(1, 3))
def test_the_load_is_the_tokens_of_the_open_sequences(
    prompts: list[list[int]], num_stages: int
) -> None:
    bench = Bench(parallel=ParallelConfig(pipeline_parallel_size=num_stages))
    requests = [bench.admit(id_, prompt) for id_, prompt in enumerate(prompts)]
    assert bench.replica.load == sum(map(len, prompts))
    while not all(request.is_finished for request in requests):
        while bench.replica.num_under_way < num_stages and bench.begin():
            pass
        bench.end()
        open_ = [request.num_tokens for request in requests if not request.is_finished]
        assert bench.replica.load == sum(open_)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output_token_ids == toy_greedy(prompt, 4)
        bench.replica.forget(request)  # again: nothing is left to let go of
    assert bench.replica.load == 0


def test_steps_end_in_the_order_in_which_they_began() -> None:
    bench = Bench(parallel=ParallelConfig(pipeline_parallel_size=2))
    first, second = bench.admit(0, [5, 6]), bench.admit(1, [7, 8, 9])
    assert bench.begin()  # both prompts
    assert not bench.begin()  # a request is in one step at a time
    bench.end()
    assert bench.begin() and bench.begin()  # noqa: PT018
    assert bench.replica.num_under_way == 2
    found = [next(iter(bench.end().sampled)) for _ in range(2)]
    assert found == [first.request_id, second.request_id]


def test_a_step_without_rows_changes_nothing_but_is_accounted_for() -> None:
    bench = Bench()
    request = bench.admit(0, [5, 6, 7])
    batch, digest = bench.replica.begin_empty_step()
    assert (batch.step, batch.requests, bench.replica.num_under_way) == (0, (), 1)
    bench.executor.submit({0: (batch, digest)})
    outcome = bench.end()
    assert (outcome.sampled, outcome.failed) == ({}, set())
    assert (request.num_computed_tokens, bench.replica.num_under_way) == (0, 0)


def test_siblings_of_a_failed_sequence_fail_too_and_others_go_on() -> None:
    bench = Bench()
    bad, sibling, other = (bench.admit(id_, p) for id_, p in enumerate([[60], [5, 6], [7, 8]]))
    bench.begin()
    outcome = bench.end(lambda id_: {0, 1} if id_ < 2 else {id_})
    assert outcome.failed == {0, 1}
    assert (bad.finish_reason, sibling.finish_reason, other.finish_reason) == (
        "error",
        "error",
        None,
    )
    assert other.output_token_ids == toy_greedy([7, 8], 1)


def test_prompt_logprobs_that_do_not_come_fail_their_request() -> None:
    bench = Bench()
    bench.admit(0, [5, 6, 7], prompt_logprobs=1)
    bench.admit(1, [5, 6, 7])
    bench.begin()
    (reply,) = bench.executor.collect(0)
    bare = [msgspec.structs.replace(found, prompt_logprobs=()) for found in reply.sampled]
    reply = msgspec.structs.replace(reply, sampled=tuple(bare))
    assert bench.replica.end_step([reply], lambda id_: {id_}).failed == {0}


def test_rows_that_were_not_written_as_planned_release_nothing() -> None:
    bench = Bench()
    request = bench.admit(0, [5, 6, 7])
    bench.begin()
    (reply,) = bench.executor.collect(0)
    wrong = msgspec.structs.replace(reply, coverage=(reply.coverage[0] ^ 1,))
    with pytest.raises(PlanMismatch, match=r"ranks \[0\] wrote KV of cache group 0"):
        bench.replica.end_step([wrong], lambda id_: {id_})
    assert (request.num_computed_tokens, request.output_token_ids) == (0, [])


def test_long_prompts_get_as_many_rows_beside_a_decode_as_the_target_allows() -> None:
    """A row takes a millisecond, so 40 of prompts fit, in units of 16; later ones read more."""
    bench = Bench(target_itl_ms=45.0, max_num_batched_tokens=64, num_blocks=100)
    bench.admit(0, [5, 6], 40, ignore_eos=True)
    bench.begin()
    bench.now += 0.002
    bench.end()
    long = bench.admit(1, [2] * 200, 1)
    sizes = []
    while not long.output_token_ids:
        assert bench.begin()
        bench.replica.note_sent()
        sizes.append(bench.replica.records[-1].num_rows)
        bench.now += sizes[-1] / 1000
        bench.end()
    assert set(sizes[:-1]) == {1 + 16, 1 + 32}
    assert sizes[0] == max(sizes)
    assert sum(sizes) == 200 + len(sizes)


def test_pins_end_by_the_clock_of_the_replica() -> None:
    bench = Bench(max_pinned_tokens=16)
    request = bench.admit(0, range(2, 12), 1)
    bench.begin()
    bench.end()
    assert request.is_finished
    assert bench.replica.cache.pin(range(2, 10), until=3.0) == 8
    for now, num_pinned in ((2.9, 2), (3.0, 0)):
        bench.now = now
        bench.begin()
        assert bench.replica.cache.num_pinned_blocks == num_pinned


@dataclass
class Standing:
    """What is asked of a replica when a place for a request is sought."""

    load: int
    hit: int = 0

    def num_hit_tokens(self, token_ids: Sequence[int], scope: CacheScope) -> int:
        return min(self.hit, len(token_ids) - 1) if scope.salt is None else 0


@pytest.mark.parametrize(
    ("standings", "salt", "chosen"),
    [
        ([(5, 0), (3, 0), (3, 0)], None, 1),
        ([(5, 0), (9, 5)], None, 1),
        ([(5, 0), (9, 4)], None, 0),
        ([(5, 0), (9, 5)], "other", 0),
        ([(7, 9)], None, 0),
    ],
    ids=["lowest of equals", "hit outweighs", "hit only evens", "salt hides", "alone"],
)
def test_a_hit_outweighs_as_much_load_as_it_is_long(
    standings: list[tuple[int, int]], salt: str | None, chosen: int
) -> None:
    replicas = [Standing(*standing) for standing in standings]
    found = choose_replica(cast("list[Replica]", replicas), range(20), CacheScope(salt=salt))
    assert found is replicas[chosen]
