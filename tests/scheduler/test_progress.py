"""What a prompt is told while it waits, against dealing its rows by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.scheduler.pacing import Pacer
from heddle.scheduler.progress import rows_until_ends
from tests.scheduler.harness import Engine

NEEDS = st.lists(st.integers(1, 150).map(lambda half: 2 * half), min_size=1, max_size=12)
"""Even, so that no odd row decides which of two equal ones is the shortest."""


def text(seed, length):
    return [1000 * (seed + 1) + at for at in range(length)]


def deal(needs: list[int], number: int) -> int:
    """Rows dealt until that prompt has ended: one in turn to the first and to the shortest."""
    left, dealt = list(needs), 0
    while left[number]:
        open_ = [at for at, need in enumerate(left) if need]
        first, shortest = open_[0], min(open_, key=lambda at: (left[at], at))
        left[shortest if dealt % 2 else first] -= 1
        dealt += 1
    return dealt


@given(NEEDS)
def test_the_rows_until_a_first_token_are_those_that_are_dealt(needs):
    assert rows_until_ends(needs) == [deal(needs, number) for number in range(len(needs))]


def test_a_queue_without_prompts_has_no_ends():
    assert rows_until_ends([]) == []


@given(st.integers(1, 12), st.integers(1, 300))
def test_of_equal_prompts_each_waits_for_those_before_it(count, need):
    assert rows_until_ends([need] * count) == [need * (number + 1) for number in range(count)]


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
    assert (first.num_computed, first.num_total, first.is_running) == (8, 100, True)
    assert (second.num_ahead, second.num_computed, second.is_running) == (0, 0, False)
    assert (third.num_ahead, third.num_computed, third.is_running) == (0, 8, True)
    assert first.first_token_seconds == pytest.approx(0.092 + 0.022)
    assert second.first_token_seconds == pytest.approx(0.2 + 0.092 + 0.022)
    assert third.first_token_seconds == pytest.approx(0.022 * 2)
    while not long.output_token_ids:
        engine.step()
    assert set(dict(engine.scheduler.progress())) == {other.request_id}
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
