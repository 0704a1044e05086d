"""Named situations: exact edges, fairness bounds, preemption, abort, bad numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.config import SamplingParams
from heddle.errors import LayoutMismatch, PlanMismatch, PromptTooLong, RequestError
from heddle.kvcache.keys import CacheScope
from heddle.layout.kv import KVLayout
from heddle.scheduler.policy import (
    DECODE_GAP_STEPS,
    FIRST_TOKEN_STEPS,
    MAX_CANDIDATES,
    MAX_OVERTAKES,
)
from heddle.scheduler.request import Request
from tests.scheduler.harness import Engine, golden

IGNORE_EOS = SamplingParams(ignore_eos=True)


def text(seed, length):
    """A prompt that shares nothing with those of other seeds."""
    return [1000 * (seed + 1) + at for at in range(length)]


def rows_of(batch):
    return {part.request.request_id: part.num_scheduled_tokens for part in batch.parts}


def never(token):
    return False


def run_until(engine, condition):
    for _ in range(200):
        if condition():
            return
        assert engine.step() is not None
    raise AssertionError("it never came about")


# Admission and exact edges.


def test_a_prompt_beyond_the_pool_is_refused_and_the_next_one_finishes():
    engine = Engine(usable_blocks=8, ranks=2, block_size=4, max_model_len=96)
    with pytest.raises(PromptTooLong, match="needs 70, usable 64, window 96"):
        engine.add(text(0, 70))
    small = engine.add(text(1, 10))
    engine.drain()
    assert small.output_token_ids == golden(text(1, 10), 4, never)


@pytest.mark.parametrize("max_tokens", [None, 0, 1, 2, 10**6])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 63, 64])
def test_every_admitted_size_ends_alone_and_with_a_small_one_behind(length, max_tokens):
    engine = Engine(
        usable_blocks=8, ranks=2, block_size=4, max_model_len=96, max_num_batched_tokens=16
    )
    big = engine.add(text(0, length), max_tokens)
    small = engine.add(text(1, 3), 2)
    room = min(96 - length, 64 - length + 1)
    assert big.max_output_tokens == (room if max_tokens is None else min(max_tokens, room))
    engine.drain()
    assert big.output_token_ids == golden(text(0, length), big.max_output_tokens, never)
    assert small.output_token_ids == golden(text(1, 3), 2, never)
    assert big.finish_reason == small.finish_reason == "length"


def test_a_pool_holds_exactly_its_printed_capacity():
    engine = Engine(usable_blocks=8, ranks=2, block_size=4, max_model_len=500)
    assert engine.cache.usable_tokens == 64
    first = engine.add(text(0, 63), 2)
    second = engine.add(text(1, 1), 1)
    engine.step()
    assert (first.num_computed_tokens, second.num_computed_tokens) == (63, 0)
    assert engine.scheduler.why_waiting() == (
        "request 1 waits for blocks: needs 1 of 8 tokens, 0 of 8 free"
    )
    engine.drain()


def test_the_copy_of_a_shared_tail_cannot_lock_a_full_pool():
    engine = Engine(usable_blocks=2, ranks=2, block_size=4, max_model_len=50)
    engine.add(text(0, 15), 1)
    engine.drain()
    again = engine.add([*text(0, 14), 5, 6], 1)
    engine.drain()
    assert again.num_cached_tokens == 8


def test_what_cannot_be_served_is_refused_at_the_door():
    engine = Engine(usable_blocks=8, ranks=2, block_size=4, max_model_len=96)
    good = {"params": SamplingParams(), "kv_layout": engine.layout, "max_output_tokens": 4}

    def offer(**changes):
        fields = {"request_id": 7, "prompt_token_ids": (1, 2), **good, **changes}
        engine.scheduler.add(Request(**fields))

    for changes, error, message in [
        ({"prompt_token_ids": ()}, RequestError, "the prompt has 0 tokens"),
        ({"max_output_tokens": 64}, RequestError, "max_output_tokens=64; .* room of 63"),
        ({"kv_layout": KVLayout(1, 1, 4)}, LayoutMismatch, "request 7 has KVLayout"),
        ({"output_token_ids": [1, 2, 3, 4]}, RequestError, "request 7 has ended"),
    ]:
        with pytest.raises(error, match=message):
            offer(**changes)
        assert not engine.scheduler.has_work
    offer(max_output_tokens=63)
    with pytest.raises(RequestError, match="request id 7 is in use"):
        offer()
    assert engine.scheduler.num_waiting == 1


# Fairness.


def test_a_decode_and_a_newcomer_beside_a_long_prompt():
    engine = Engine(max_num_batched_tokens=16)
    decode = engine.add(text(0, 4), 40, params=IGNORE_EOS)
    engine.step()
    long = engine.add(text(1, 400), 1)
    engine.step()
    newcomer = engine.add(text(2, 5), 1)
    arrived = engine.step_number + 1
    engine.drain()
    steps = engine.token_steps[decode.request_id]
    assert max(b - a for a, b in pairwise(steps)) <= DECODE_GAP_STEPS
    assert engine.token_steps[newcomer.request_id][0] < arrived + FIRST_TOKEN_STEPS
    assert engine.token_steps[long.request_id][0] <= 2 + 400 // 7


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6)), min_size=1, max_size=8),
    st.integers(1, 12),
    st.integers(1, 3),
)
def test_without_pressure_a_running_decode_never_misses_a_step(sizes, budget, partial):
    engine = Engine(max_num_batched_tokens=budget, max_num_partial_prefills=partial)
    for seed, (length, outputs) in enumerate(sizes):
        engine.add(text(seed, length), outputs, params=IGNORE_EOS)
        engine.step()
    engine.drain()
    for request in engine.requests.values():
        steps = engine.token_steps[request.request_id]
        assert len(steps) == request.max_output_tokens
        assert all(b - a <= DECODE_GAP_STEPS for a, b in pairwise(steps))
        assert request.num_preemptions == 0


def test_short_prompts_pass_long_ones_that_wait_for_a_slot_and_do_not_starve_them():
    engine = Engine(
        usable_blocks=400, max_num_batched_tokens=16, max_num_partial_prefills=1, max_num_seqs=8
    )
    first = engine.add(text(0, 100), 1)
    second = engine.add(text(1, 100), 1)
    for seed in range(2, 62):
        short = engine.add(text(seed, 6), 1)
        engine.step()
        assert short.is_finished, "a short prompt waited for a slot"
    assert engine.token_steps[first.request_id] < engine.token_steps[second.request_id]
    assert engine.token_steps[second.request_id][0] <= 2 * (100 // 8 + 1)


def test_a_step_looks_at_a_bounded_part_of_the_queue():
    engine = Engine(usable_blocks=1000, max_num_batched_tokens=16, max_num_partial_prefills=1)
    for seed in range(MAX_CANDIDATES - 1):
        engine.add(text(seed, 20), 1)
    near, far = engine.add(text(200, 2), 1), engine.add(text(201, 2), 1)
    engine.step()  # one long prompt starts, the others wait for its slot
    assert near.is_finished
    assert far.num_computed_tokens == 0
    engine.step()
    assert far.is_finished
    engine.drain()


def test_a_head_that_does_not_fit_is_overtaken_a_bounded_number_of_times():
    engine = Engine(usable_blocks=10, max_num_batched_tokens=64)
    engine.add(text(0, 40), 33, params=IGNORE_EOS)
    engine.step()
    head = engine.add(text(1, 48), 1)
    started_before = 0
    for seed in range(2, 40):
        engine.add(text(seed, 4), 1)
        engine.step()
    for request in list(engine.requests.values())[2:]:
        started_before += bool(engine.token_steps[request.request_id]) and (
            not head.is_finished
            or engine.token_steps[request.request_id] < engine.token_steps[head.request_id]
        )
    assert started_before == MAX_OVERTAKES
    engine.drain()


def test_seats_bound_what_runs_and_the_reason_is_told():
    engine = Engine(max_num_seqs=2)
    for seed in range(3):
        engine.add(text(seed, 3), 3, params=IGNORE_EOS)
    engine.step()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (2, 1)
    assert engine.scheduler.why_waiting() == "request 2 waits for a seat: 2 of 2 run"
    engine.drain()
    assert engine.scheduler.why_waiting() is None


def test_no_more_run_than_a_step_has_rows():
    engine = Engine(max_num_batched_tokens=2)
    for seed in range(3):
        engine.add(text(seed, 1), 3, params=IGNORE_EOS)
    engine.step()
    assert engine.scheduler.why_waiting() == "request 2 waits for a seat: 2 of 2 run"
    engine.drain()


def test_slots_bound_half_done_prompts_and_the_reason_is_told():
    engine = Engine(max_num_batched_tokens=8, max_num_partial_prefills=2)
    for seed, length in enumerate((300, 200, 180, 170)):
        engine.add(text(seed, length), 1)
        engine.step()
    assert [rows_of(batch) for batch in engine.batches[:2]] == [{0: 8}, {0: 4, 1: 4}]
    assert rows_of(engine.batches[3]) == {0: 4, 1: 4}
    assert engine.scheduler.why_waiting() == (
        "request 2 waits for a prefill slot: 2 prompts are part-way through"
    )
    engine.drain()


def test_equal_prompts_start_one_after_another_and_the_later_find_what_the_first_computed():
    engine = Engine(usable_blocks=400, max_num_batched_tokens=16, max_num_partial_prefills=4)
    prompt = text(0, 160)
    requests = [engine.add([*prompt, seed, 1, 2], 1) for seed in range(4)]
    engine.step()
    assert engine.scheduler.why_waiting() == (
        "request 1 waits for rows: 1 prompt is part-way through"
    )
    engine.drain()
    assert [request.num_cached_tokens >= 152 for request in requests] == [False, True, True, True]
    steps = [engine.token_steps[request.request_id][0] for request in requests]
    assert steps[0] == -(-163 // 16)
    assert steps[3] <= steps[0] + 3


@given(st.integers(17, 60), st.integers(1, 2))
def test_a_long_prompt_that_waits_starts_whatever_comes_after_it(later, per_step):
    """The first one ends, and what its last piece leaves over is for the next in order."""
    engine = Engine(usable_blocks=1000, max_num_batched_tokens=16, max_num_seqs=64)
    first, second = engine.add(text(0, 120), 1), engine.add(text(1, 120), 1)
    for seed in range(2, 60):
        for at in range(per_step):
            engine.add(text(100 * at + seed, later), 1)
        engine.step()
    assert engine.token_steps[first.request_id][0] <= -(-120 // 8) + 1
    assert engine.token_steps[second.request_id][0] <= 2 * (-(-120 // 8) + 1)
    engine.drain()


def test_a_shorter_prompt_passes_a_longer_one_at_half_the_rows():
    engine = Engine(usable_blocks=400, max_num_batched_tokens=16)
    long, short = engine.add(text(0, 1000), 1), engine.add(text(1, 80), 1)
    engine.drain()
    assert engine.token_steps[short.request_id][0] == 80 // 8
    assert engine.token_steps[long.request_id][0] == -(-1080 // 16)


@given(st.lists(st.integers(20, 120), min_size=2, max_size=12), st.integers(1, 3))
def test_the_first_prompt_gets_on_whatever_comes_after_it(lengths, partial):
    """Short ones take half of the rows at most, and of the rest half is its own."""
    engine = Engine(
        usable_blocks=1000,
        max_num_batched_tokens=16,
        max_num_partial_prefills=partial,
        max_num_seqs=8,
    )
    first = engine.add(text(0, lengths[0]), 1)
    for seed, length in enumerate(lengths[1:], start=1):
        engine.add(text(seed, length), 1)
        engine.add(text(50 + seed, 4), 1)  # a short one in each step
        engine.step()
    engine.drain()
    assert engine.token_steps[first.request_id][0] <= -(-lengths[0] // 4)


def test_a_long_prompt_takes_at_most_its_threshold():
    engine = Engine(max_num_batched_tokens=32, long_prefill_token_threshold=10)
    engine.add(text(0, 25), 1)
    engine.add(text(1, 10), 1)
    engine.drain()
    rows = [
        [(part.request.request_id, part.num_scheduled_tokens) for part in batch.parts]
        for batch in engine.batches
    ]
    assert rows == [[(1, 10), (0, 10)], [(0, 10)], [(0, 5)]]


# Preemption.


def test_two_requests_in_a_pool_for_one_and_a_half_both_finish():
    engine = Engine(usable_blocks=10, max_num_batched_tokens=8)
    older = engine.add(text(0, 24), 32, params=IGNORE_EOS)
    younger = engine.add(text(1, 24), 32, params=IGNORE_EOS)
    engine.drain()
    assert older.num_preemptions == 0
    assert younger.num_preemptions == 1
    assert younger.num_lost_tokens >= 24
    for seed, request in enumerate((older, younger)):
        assert request.output_token_ids == golden(text(seed, 24), 32, never)


@pytest.mark.parametrize("caching", [True, False])
def test_a_resumed_request_ends_with_the_tokens_it_would_have_had(caching):
    calm = Engine(usable_blocks=200, caching=caching)
    tight = Engine(usable_blocks=9, caching=caching, max_num_batched_tokens=8)
    for engine in (calm, tight):
        for seed in range(5):
            engine.add(text(seed, 10 + seed), 30, params=IGNORE_EOS)
        engine.drain()
    assert sum(request.num_preemptions for request in tight.requests.values()) > 0
    for number in range(5):
        assert tight.requests[number].output_token_ids == calm.requests[number].output_token_ids
    lost = sum(request.num_lost_tokens for request in tight.requests.values())
    rows = sum(batch.num_rows for batch in tight.batches)
    assert (rows == 5 * 29 + sum(range(10, 15)) + lost) == (not caching)


def test_preemptions_are_bounded_by_what_older_requests_grow():
    engine = Engine(usable_blocks=12, max_num_batched_tokens=16)
    for seed in range(8):
        engine.add(text(seed, 8), 40, params=IGNORE_EOS)
    engine.drain()
    growth = -(-47 // 8) - 1
    counts = [request.num_preemptions for request in engine.requests.values()]
    assert counts[0] == 0
    assert max(counts) > 0
    assert all(count <= growth * (at + 1) for at, count in enumerate(counts))


def test_a_restart_waits_for_all_that_it_may_still_need():
    engine = Engine(usable_blocks=10, max_num_batched_tokens=64)
    oldest = engine.add(text(0, 24), 40, params=IGNORE_EOS)
    engine.add(text(1, 8), 10, params=IGNORE_EOS)
    victim = engine.add(text(2, 24), 30, params=IGNORE_EOS)
    run_until(engine, lambda: victim.num_preemptions)
    run_until(engine, lambda: len(engine.batches[-1].parts) == 1)
    # Its 33 tokens would fit beside the oldest, its 53 do not.
    assert (victim.num_tokens, engine.cache.num_available_blocks) == (33, 5)
    assert engine.scheduler.why_waiting() == (
        "request 2 waits for blocks: needs 7 of 8 tokens, 5 of 10 free"
    )
    engine.drain()
    assert (oldest.num_preemptions, victim.num_preemptions) == (0, 1)


def test_what_a_preemption_frees_is_not_for_newcomers():
    engine = Engine(usable_blocks=4, max_num_batched_tokens=64)
    oldest = engine.add(text(0, 8), 12, params=IGNORE_EOS)
    victim = engine.add(text(1, 17), 4, params=IGNORE_EOS)
    engine.step()
    newcomer = engine.add(text(2, 3), 1)
    engine.step()
    assert engine.batches[-1].preempted == (victim.request_id,)
    assert (newcomer.num_computed_tokens, oldest.num_tokens) == (0, 10)
    engine.step()
    assert newcomer.is_finished
    engine.drain()


def test_a_preempted_request_keeps_its_first_cached_count():
    engine = Engine(usable_blocks=4, max_num_batched_tokens=64)
    engine.add(text(1, 17), 1)
    engine.drain()
    engine.add(text(0, 8), 12, params=IGNORE_EOS)
    victim = engine.add(text(1, 19), 4, params=IGNORE_EOS)
    engine.step()
    cached = victim.num_cached_tokens
    run_until(engine, lambda: victim.num_preemptions)
    assert (cached, victim.num_lost_tokens) == (16, 19)
    engine.drain()
    assert victim.num_cached_tokens == cached
    assert victim.output_token_ids == golden(text(1, 19), 4, never)


def test_a_preempted_request_can_be_aborted():
    engine = Engine(usable_blocks=4, max_num_batched_tokens=64)
    engine.add(text(0, 8), 12, params=IGNORE_EOS)
    victim = engine.add(text(1, 17), 4, params=IGNORE_EOS)
    run_until(engine, lambda: victim.num_preemptions)
    assert engine.scheduler.finish(victim.request_id, "abort", None) is victim
    engine.drain()
    assert victim.finish_reason == "abort"


# The end of a request.


@pytest.mark.parametrize("steps", range(12))
@pytest.mark.parametrize("under_way", [False, True])
def test_an_abort_at_any_moment_returns_all_blocks_and_spares_the_neighbour(steps, under_way):
    engine = Engine(max_num_batched_tokens=9)
    victim = engine.add(text(0, 64), 4, params=IGNORE_EOS)
    neighbour = engine.add(text(1, 20), 9, params=IGNORE_EOS)
    for _ in range(steps):
        engine.step()
    rows = victim.num_computed_tokens

    def abort():
        assert engine.scheduler.finish(victim.request_id, "abort", None) is victim
        assert engine.scheduler.finish(victim.request_id, "abort", None) is None

    if under_way:
        held = list(victim.block_tables[0])
        engine.step(during=lambda: (abort(), held.extend(victim.block_tables[0])))
        assert held, "blocks must stay until the step has ended"
    else:
        abort()
    assert victim.block_tables == ([],)
    assert victim.num_computed_tokens == rows, "prefill went on"
    assert (victim.finish_reason, victim.is_finished) == ("abort", True)
    engine.drain()
    assert neighbour.output_token_ids == golden(text(1, 20), 9, never)


def test_a_stop_string_found_by_the_driver_ends_a_request():
    engine = Engine()
    request = engine.add(text(0, 5), 20, params=IGNORE_EOS)
    engine.step()
    assert engine.scheduler.finish(request.request_id, "stop", "###") is request
    assert (request.finish_reason, request.stop_reason) == ("stop", "###")
    assert not engine.scheduler.has_work
    engine.drain()


def test_update_reports_what_ended_and_why():
    engine = Engine()
    prompt = text(0, 5)
    outputs = golden(prompt, 3, never)
    by_length = engine.add(prompt, 3, params=IGNORE_EOS)
    by_id = engine.add(prompt, 9, params=SamplingParams(stop_token_ids=(outputs[1],)))
    by_eos = engine.add(prompt, 9, eos_token_ids=(outputs[1],))
    assert [engine.step(), engine.step(), engine.step()] == [[], [by_id, by_eos], [by_length]]
    assert (by_length.finish_reason, by_length.stop_reason) == ("length", None)
    assert (by_id.finish_reason, by_id.stop_reason) == ("stop", outputs[1])
    assert (by_eos.finish_reason, by_eos.stop_reason) == ("stop", None)


def test_a_lost_token_stops_the_step_before_anything_changes():
    engine = Engine()
    request = engine.add(text(0, 5), 3)
    batch = engine.scheduler.schedule()
    with pytest.raises(PlanMismatch, match="request 0 sampled, but no token came back"):
        engine.scheduler.update(batch, {})
    assert (request.num_computed_tokens, request.output_token_ids) == (0, [])
    engine.scheduler.update(batch, {0: [5]})
    assert (request.num_computed_tokens, request.output_token_ids) == (5, [5])


# Bad numbers.


@pytest.mark.parametrize("bad_step", [1, 2, 4])
def test_a_failed_request_takes_nothing_with_it(bad_step):
    engine = Engine(usable_blocks=20, max_num_batched_tokens=12)
    for seed in range(3):
        engine.add(text(seed, 10), 6, params=IGNORE_EOS)
    for _ in range(bad_step - 1):
        engine.step()
    blocks = set(engine.requests[1].block_tables[0])
    ended = engine.step(failed=[1])
    bad = engine.requests[1]
    assert (ended, bad.finish_reason, bad.block_tables) == ([bad], "error", ([],))
    engine.step()
    wiped = engine.batches[-1].wiped_blocks
    assert len(wiped) == 2
    assert blocks <= set(wiped)
    again = engine.add(text(1, 10), 6, params=IGNORE_EOS)
    engine.drain()
    assert again.num_cached_tokens == 0
    for number, seed in ((0, 0), (2, 2), (3, 1)):
        expected = golden(text(seed, 10), 6, never)
        assert engine.requests[number].output_token_ids == expected
    assert sum(bool(batch.wiped_blocks) for batch in engine.batches) == 1


def test_an_abort_does_not_hide_bad_numbers():
    engine = Engine()
    engine.add(text(0, 10), 6)
    ended = engine.step(failed=[0], during=lambda: engine.scheduler.finish(0, "abort", None))
    assert (ended, engine.requests[0].finish_reason) == ([], "abort")
    again = engine.add(text(0, 10), 1)
    engine.drain()
    assert again.num_cached_tokens == 0
    assert len(engine.batches[-1].wiped_blocks) == 2


def test_wipes_wait_for_the_next_step_however_late_it_comes():
    engine = Engine()
    engine.add(text(0, 10), 6)
    engine.step(failed=[0])
    assert engine.step() is None
    engine.add(text(1, 10), 1)
    engine.step()
    assert len(engine.batches[-1].wiped_blocks) == 2


# Cached prompts.


def test_cached_tokens_are_those_of_the_first_start_and_zero_has_a_reason():
    engine = Engine(usable_blocks=20)
    prompt = text(0, 21)
    cold = engine.add(prompt, 2)
    engine.drain()
    warm = engine.add(prompt, 2)
    other = engine.add(text(5, 9), 2)
    excluded = engine.add(prompt, 2, skip_prefix_hit=True)
    salted = engine.add(prompt, 2, cache_scope=CacheScope(salt="mine"))
    engine.drain()
    assert [r.num_cached_tokens for r in engine.requests.values()] == [0, 20, 0, 0, 0]
    assert (warm.no_hit_reason, cold.no_hit_reason) == ("", "nothing shared")
    assert (other.no_hit_reason, salted.no_hit_reason) == ("nothing shared", "nothing shared")
    assert excluded.no_hit_reason == "feature excluded"
    expected = golden(prompt, 2, never)
    assert all(r.output_token_ids == expected for r in (cold, warm, excluded, salted))


def test_a_conversation_reuses_its_own_answers():
    engine = Engine(usable_blocks=50)
    first = engine.add(text(0, 13), 9, params=IGNORE_EOS)
    engine.drain()
    turn = [*first.token_ids, *text(1, 5)]
    second = engine.add(turn, 3, params=IGNORE_EOS)
    engine.drain()
    assert second.num_cached_tokens == 13 + 9 - 1  # the last token was never fed back
    assert second.output_token_ids == golden(turn, 3, never)


def test_a_replayed_request_goes_on_where_it_was():
    engine = Engine()
    prompt = text(0, 7)
    begun = golden(prompt, 3, never)
    request = engine.add(prompt, 8, params=IGNORE_EOS, output_token_ids=list(begun))
    engine.drain()
    assert request.output_token_ids == golden(prompt, 8, never)


def test_steps_end_in_the_order_in_which_they_began():
    engine = Engine()
    engine.add(text(0, 3))
    first = engine.scheduler.schedule()
    engine.add(text(1, 3))
    second = engine.scheduler.schedule()
    with pytest.raises(AssertionError, match="the oldest batch under way"):
        engine.scheduler.update(second, {1: [5]})
    engine.scheduler.update(first, {0: [5]})
    engine.scheduler.update(second, {1: [6]})
    with pytest.raises(AssertionError, match="the oldest batch under way"):
        engine.scheduler.update(first, {})
