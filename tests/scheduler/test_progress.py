"""What a prompt is told while it waits, against dealing its rows by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.scheduler.pacing import Pacer
from heddle.scheduler.progress import RowNeeds, estimate_first_token
from tests.scheduler.harness import Engine

NEEDS = st.lists(st.integers(0, 300), max_size=12)


def text(seed, length):
    return [1000 * (seed + 1) + at for at in range(length)]


@given(NEEDS, NEEDS, st.integers(0, 300))
def test_a_sum_is_exact_but_for_needs_as_long_as_the_bound(kept, gone, bound):
    needs = RowNeeds([*kept, *gone])
    for need in gone:
        needs.remove(need)
    exact = sum(min(need, bound) for need in kept)
    alike = [min(need, bound) for need in kept if need.bit_length() == bound.bit_length()]
    assert exact <= needs.bounded_sum(bound) <= exact + sum(alike)
    if len(alike) < 2:
        assert needs.bounded_sum(bound) == exact


@given(st.integers(1, 60), st.lists(st.sampled_from([1, 3, 100, 200]), max_size=4))
def test_an_even_share_ends_a_prompt_when_the_estimate_says(own, others):
    others = [need for need in others if need.bit_length() != own.bit_length()]
    left = [own, *others]
    dealt = 0
    while left[0]:
        for at in reversed(range(len(left))):  # the prompt in question comes last in each turn
            if left[at]:
                left[at] -= 1
                dealt += 1
    assert estimate_first_token(own, RowNeeds(others), 8.0) == dealt / 8
    assert estimate_first_token(own, RowNeeds(others), None) is None


def test_prompts_tell_how_far_they_are_until_their_first_token():
    engine = Engine(max_num_batched_tokens=16, max_num_partial_prefills=1)
    engine.pace(Pacer(target_seconds=None, max_rows=16, attention_length=1e9))
    long, other, short = (engine.add(text(at, n), 3) for at, n in enumerate([100, 200, 30]))
    before = dict(engine.scheduler.progress())
    assert [found.num_ahead for found in before.values()] == [0, 1, 2]
    assert {found.first_token_seconds for found in before.values()} == {None}
    engine.step()
    found = dict(engine.scheduler.progress())  # a row takes a millisecond
    first, second, third = (found[request.request_id] for request in (long, other, short))
    assert (first.num_computed, first.num_total, first.is_running) == (16, 100, True)
    assert (second.num_ahead, second.num_computed, second.is_running) == (0, 0, False)
    assert third.num_ahead == 1
    assert first.first_token_seconds == pytest.approx(0.084)
    assert second.first_token_seconds == pytest.approx(0.084 + 0.2)
    assert third.first_token_seconds == pytest.approx(0.030 * 3)
    while not long.output_token_ids:
        engine.step()
    assert set(dict(engine.scheduler.progress())) == {1, 2}
    engine.drain()
    assert dict(engine.scheduler.progress()) == {}


def test_cached_tokens_are_computed_from_the_start():
    engine = Engine(max_num_batched_tokens=8)
    engine.add(text(0, 40), 1)
    engine.drain()
    again = engine.add([*text(0, 40), *text(1, 40)], 1)
    engine.step()
    found = dict(engine.scheduler.progress())[again.request_id]
    assert found.num_cached == again.num_cached_tokens > 0
    assert found.num_computed == found.num_cached + 8
    engine.drain()
