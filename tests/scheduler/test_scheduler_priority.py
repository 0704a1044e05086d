"""Priorities: who starts, who gives way, and what stays as it was."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from heddle.config import SamplingParams
from tests.scheduler.harness import Engine, golden

IGNORE_EOS = SamplingParams(ignore_eos=True)
SIZES = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 6), st.integers(-2, 2)), min_size=1, max_size=8
)


def text(seed, length):
    return [1000 * (seed + 1) + at for at in range(length)]


def first_tokens(engine, requests):
    return [engine.token_steps[request.request_id][0] for request in requests]


def test_lower_numbers_start_first_and_equals_as_they_came():
    engine = Engine(max_num_seqs=1, policy="priority")
    requests = [
        engine.add(text(at, 3), 2, priority=priority) for at, priority in enumerate([5, 0, -1, 0])
    ]
    assert [progress.num_ahead for _, progress in engine.scheduler.progress()] == [0, 1, 2, 3]
    engine.drain()
    starts = first_tokens(engine, requests)
    assert sorted(range(4), key=starts.__getitem__) == [2, 1, 3, 0]


def test_first_come_first_served_ignores_priorities():
    engine = Engine(max_num_seqs=1)
    requests = [engine.add(text(at, 3), 2, priority=-at) for at in range(4)]
    engine.drain()
    starts = first_tokens(engine, requests)
    assert starts == sorted(starts)


def test_the_least_urgent_gives_way_though_it_came_first():
    engine = Engine(usable_blocks=4, ranks=1, block_size=2, policy="priority", caching=False)
    first = engine.add(text(0, 3), 6, params=IGNORE_EOS, priority=1)
    urgent = engine.add(text(1, 3), 6, params=IGNORE_EOS, priority=0)
    engine.drain()
    assert (first.num_preemptions > 0, urgent.num_preemptions) == (True, 0)
    assert first.output_token_ids == golden(text(0, 3), 6, lambda token: False)


def test_an_urgent_one_takes_no_seat_from_one_that_runs():
    engine = Engine(max_num_seqs=1, policy="priority")
    running = engine.add(text(0, 3), 4, params=IGNORE_EOS, priority=9)
    engine.step()
    urgent = engine.add(text(1, 3), 1, priority=0)
    engine.drain()
    assert running.num_preemptions == 0
    assert first_tokens(engine, [urgent])[0] > engine.token_steps[running.request_id][-1]


@given(SIZES, st.integers(2, 6), st.integers(1, 8), st.integers(1, 3))
def test_the_first_in_order_is_never_preempted_and_all_end_as_if_alone(
    sizes, usable_blocks, budget, num_places
):
    engine = Engine(
        usable_blocks=usable_blocks,
        ranks=1,
        block_size=4,
        policy="priority",
        max_num_batched_tokens=budget,
        max_model_len=4 * usable_blocks,
        num_places=num_places,
    )
    requests = [
        engine.add(text(at, length % (4 * usable_blocks - 1) + 1), outputs, priority=priority)
        for at, (length, outputs, priority) in enumerate(sizes)
    ]
    first = min(requests, key=lambda request: (request.priority, request.arrival))
    engine.drain()  # the engine checks at each step that the first of the running keeps its blocks
    assert first.num_preemptions == 0
    for request in requests:
        alone = golden(request.prompt_token_ids, request.max_output_tokens, lambda token: False)
        assert request.output_token_ids == alone
