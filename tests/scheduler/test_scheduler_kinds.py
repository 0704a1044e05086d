"""Models with windows and recurrent layers: capacity, pieces, hits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.config.visibility import Visibility
from tests.scheduler.harness import Engine, golden
from tests.scheduler.test_scheduler import IGNORE_EOS, never, text

WINDOW = Visibility("window", 8)


def test_windows_alone_serve_prompts_far_beyond_the_pool():
    engine = Engine(
        usable_blocks=6, has_full=False, windows=[(WINDOW, 1)], max_num_batched_tokens=8
    )
    request = engine.add(text(0, 300), 20, params=IGNORE_EOS)
    engine.drain()
    assert request.output_token_ids == golden(text(0, 300), 20, never)
    assert request.num_preemptions == 0


def test_two_half_filled_prompts_cannot_lock_each_other():
    # Each may need 5 blocks of 4 at once: a run of 7 + 8 tokens.
    engine = Engine(
        usable_blocks=9, has_full=False, windows=[(WINDOW, 1)], max_num_batched_tokens=8
    )
    first, second = engine.add(text(0, 60), 2), engine.add(text(1, 60), 2)
    engine.step()
    assert (first.num_computed_tokens, second.num_computed_tokens) == (8, 0)
    assert engine.scheduler.why_waiting() == (
        "request 1 waits for blocks: needs 5 of 4 tokens, 4 of 9 free"
    )
    engine.drain()
    assert second.num_preemptions == first.num_preemptions == 0


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 8)), min_size=1, max_size=5),
    st.sampled_from([WINDOW, Visibility("window", 5, num_first=3), Visibility("chunk", 6)]),
    st.integers(6, 16),
    st.booleans(),
)
def test_whatever_is_admitted_ends_as_if_alone(sizes, rule, usable_blocks, has_full):
    engine = Engine(
        usable_blocks=usable_blocks,
        ranks=2,
        block_size=2,
        has_full=has_full,
        windows=[(rule, 1)],
        max_num_batched_tokens=6,
    )
    admitted = []
    for seed, (length, outputs) in enumerate(sizes):
        if length <= engine.cache.usable_tokens:
            admitted.append((seed, length, engine.add(text(seed, length), outputs)))
    engine.drain()
    for seed, length, request in admitted:
        expected = golden(text(seed, length), request.max_output_tokens, never)
        assert request.output_token_ids == expected


def test_a_conversation_goes_on_from_window_and_state():
    engine = Engine(
        windows=[(WINDOW, 1)], num_state_slots=6, max_num_batched_tokens=16, state_unit=8
    )
    first = engine.add(text(0, 33), 9, params=IGNORE_EOS)
    engine.drain()
    turn = [*first.token_ids, *text(1, 5)]
    second = engine.add(turn, 3, params=IGNORE_EOS)
    engine.drain()
    assert second.num_cached_tokens == 33 + 9 - 1  # the last token was never fed back
    assert second.output_token_ids == golden(turn, 3, never)


def test_pieces_end_where_snapshots_are_taken():
    engine = Engine(num_state_slots=9, state_unit=8, max_num_batched_tokens=11)
    engine.add(text(0, 30), 1)
    engine.drain()
    assert [batch.num_rows for batch in engine.batches] == [8, 8, 8, 6]
    shared = engine.add([*text(0, 20), 7, 7], 1)
    engine.drain()
    assert shared.num_cached_tokens == 16


def test_a_piece_below_the_border_still_moves_on():
    engine = Engine(num_state_slots=9, state_unit=8, max_num_batched_tokens=3)
    engine.add(text(0, 20), 1)
    engine.drain()
    ends, at = [], 0
    for batch in engine.batches:
        at += batch.num_rows
        ends.append(at)
    assert ends == [3, 6, 8, 11, 14, 16, 19, 20]


@pytest.mark.parametrize("states", [1, 2])
def test_sequences_wait_for_state_slots(states):
    engine = Engine(num_state_slots=1 + 2 * states, states_per_sequence=states)
    for seed in range(3):
        engine.add(text(seed, 5), 4, params=IGNORE_EOS)
    engine.step()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (2, 1)
    assert engine.scheduler.why_waiting() == f"request 2 waits for state slots: needs {states}"
    engine.drain()
    for seed in range(3):
        assert engine.requests[seed].output_token_ids == golden(text(seed, 5), 4, never)


def test_an_abort_under_way_leaves_no_state_that_has_moved_on():
    engine = Engine(num_state_slots=5, state_unit=8, max_num_batched_tokens=5)
    engine.add(text(0, 30), 4)
    for _ in range(2):
        engine.step()  # ends at 5, then at 8, where a snapshot is taken
    engine.step()
    engine.step(during=lambda: engine.scheduler.finish(0, "abort", None))  # from 13 to 16
    again = engine.add(text(0, 30), 4, params=IGNORE_EOS)
    engine.drain()
    assert again.num_cached_tokens == 8
    assert again.output_token_ids == golden(text(0, 30), 4, never)


def test_rotated_chains_read_what_they_wrote():
    engine = Engine(ranks=3, rotates=True, windows=[(WINDOW, 1)])
    for seed in range(4):
        engine.add(text(seed, 9 + seed), 5, params=IGNORE_EOS)
    engine.step()
    assert len({request.blocks.start_rank for request in engine.running}) > 1
    engine.drain()
    for seed in range(4):
        again = engine.add([*text(seed, 9 + seed), 3], 3, params=IGNORE_EOS)
        engine.drain()
        assert again.num_cached_tokens == 9 + seed
