"""Drafts in the scheduler: rows, blocks, results."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.config import SamplingParams
from heddle.config.visibility import Visibility
from tests.scheduler.harness import Engine, golden
from tests.scheduler.test_scheduler import IGNORE_EOS, never, text


def parts_of(batch):
    return [
        (part.request.request_id, part.num_known_tokens, part.num_drafts) for part in batch.parts
    ]


def run_with_guesses(engine, count, num_right):
    """Run until nothing is left, guessing before each step."""
    for _ in range(500):
        engine.guess(count, num_right)
        if engine.step() is None:
            return
    raise AssertionError("it never ended")


@given(
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(1, 20),
    st.integers(1, 12),
    st.integers(1, 3),
    st.sampled_from([(), ((Visibility("window", 6), 1),)]),
)
def test_outputs_are_those_without_drafts(count, right, length, limit, ranks, windows):
    engine = Engine(ranks=ranks, block_size=2, windows=windows, max_num_batched_tokens=9)
    requests = [
        engine.add(text(seed, length + seed), limit, params=IGNORE_EOS) for seed in range(2)
    ]
    run_with_guesses(engine, count, min(count, right))
    for seed, request in enumerate(requests):
        assert request.output_token_ids == golden(text(seed, length + seed), limit, never)
    engine.drain()


def test_a_decode_brings_one_token_more_than_it_has_right_drafts():
    engine = Engine()
    request = engine.add(text(0, 5), 20, params=IGNORE_EOS)
    engine.step()
    engine.guess(4, 3)
    engine.step()
    assert parts_of(engine.batches[-1]) == [(0, 1, 4)]
    assert engine.batches[-1].parts[0].num_sampled_rows == 5
    assert (len(request.output_token_ids), request.num_computed_tokens) == (1 + 4, 5 + 4)
    engine.step()
    assert parts_of(engine.batches[-1]) == [(0, 1, 0)], "a guess is for one step"
    engine.drain()


def test_drafts_never_reach_the_last_token():
    engine = Engine()
    request = engine.add(text(0, 5), 4, params=IGNORE_EOS)
    engine.step()
    engine.guess(9, 9)
    engine.step()
    assert parts_of(engine.batches[-1]) == [(0, 1, 2)]
    assert (request.finish_reason, len(request.output_token_ids)) == ("length", 4)
    engine.drain()


def test_tokens_after_the_one_that_ends_a_request_are_dropped():
    prompt = text(0, 5)
    outputs = golden(prompt, 6, never)
    engine = Engine()
    request = engine.add(prompt, 9, params=SamplingParams(stop_token_ids=(outputs[2],)))
    engine.step()
    engine.guess(5, 5)
    engine.step()
    assert request.output_token_ids == outputs[:3]
    assert (request.finish_reason, request.stop_reason) == ("stop", outputs[2])
    engine.drain()


def test_prompts_get_their_rows_before_drafts_take_the_rest():
    engine = Engine(max_num_batched_tokens=12)
    decodes = [engine.add(text(seed, 2), 30, params=IGNORE_EOS) for seed in range(2)]
    engine.step()
    engine.add(text(8, 60), 1)
    engine.guess(8, 8)
    engine.step()
    # 10 rows beside the two decodes: a short prompt would get half of them, so do the drafts.
    assert parts_of(engine.batches[-1]) == [(0, 1, 5), (1, 1, 0), (2, 5, 0)]
    engine.guess(8, 8)
    engine.add(text(9, 4), 1)
    engine.step()
    assert parts_of(engine.batches[-1]) == [(0, 1, 3), (1, 1, 0), (3, 4, 0), (2, 3, 0)]
    assert not any(request.is_finished for request in decodes)
    engine.drain()


def test_drafts_take_no_block_that_is_not_there():
    engine = Engine(usable_blocks=2, ranks=1, block_size=4)
    request = engine.add(text(0, 6), 3, params=IGNORE_EOS)
    other = engine.add(text(1, 2), 1)
    engine.step()
    engine.guess(2, 2)
    assert other.num_computed_tokens == 0
    engine.step()
    # Positions 6 and 7 are left of its two blocks.
    assert parts_of(engine.batches[-1])[0] == (0, 1, 1)
    assert request.is_finished
    engine.drain()


def test_drafts_need_a_state_for_each_row():
    engine = Engine(num_state_slots=9, states_per_sequence=3)
    request = engine.add(text(0, 5), 20, params=IGNORE_EOS)
    engine.step()
    engine.guess(6, 6)
    engine.step()
    assert parts_of(engine.batches[-1]) == [(0, 1, 2)]
    engine.drain()
    assert request.output_token_ids == golden(text(0, 5), 20, never)


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_rejected_rows_are_never_found_again(num_right):
    engine = Engine(ranks=1, block_size=4)
    first = engine.add(text(0, 7), 6, params=IGNORE_EOS)
    engine.step()
    engine.guess(3, num_right)
    wrong = [*first.token_ids, *first.draft_token_ids]
    engine.step()
    engine.scheduler.finish(0, "abort", None)
    again = engine.add([*wrong, 5, 6], 2, params=IGNORE_EOS)
    engine.drain()
    assert again.num_cached_tokens == 7 + 1 + num_right
    assert again.output_token_ids == golden([*wrong, 5, 6], 2, never)
