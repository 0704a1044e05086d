"""Who starts, and what the others are told that they wait for."""

from __future__ import annotations

from heddle.config import SamplingParams
from heddle.scheduler.policy import MAX_OVERTAKES
from tests.scheduler.harness import Engine

NOBODY = {"capacity": 0, "seats": 0, "prefill_slots": 0, "next_step": 0}
IGNORE_EOS = SamplingParams(ignore_eos=True)


def text(seed, length):
    return [1000 * (seed + 1) + at for at in range(length)]


def reasons(engine):
    counts = engine.scheduler.waiting_by_reason()
    assert sum(counts.values()) == engine.scheduler.num_waiting
    assert set(counts) == set(NOBODY)
    return {reason: count for reason, count in counts.items() if count}


def test_who_has_not_been_looked_at_waits_for_the_next_step():
    engine = Engine()
    assert engine.scheduler.waiting_by_reason() == NOBODY
    engine.add(text(0, 3))
    assert reasons(engine) == {"next_step": 1}
    engine.step()
    assert reasons(engine) == {}
    engine.drain()


def test_seats_hold_up_all_that_wait():
    engine = Engine(max_num_seqs=1)
    for seed in range(3):
        engine.add(text(seed, 3), 4)
    engine.step()
    assert reasons(engine) == {"seats": 2}
    assert engine.scheduler.why_waiting() == "request 1 waits for a seat: 1 of 1 run"
    engine.drain()


def test_prefill_slots_hold_up_long_prompts_only():
    engine = Engine(max_num_batched_tokens=8, max_num_partial_prefills=1)
    engine.add(text(0, 60), 1)
    engine.add(text(1, 60), 1)
    engine.add(text(2, 60), 1)
    short = engine.add(text(3, 2), 1)
    engine.step()
    assert reasons(engine) == {"prefill_slots": 2}
    assert short.is_finished
    engine.drain()


def test_rows_hold_up_what_has_all_the_rest():
    engine = Engine(max_num_batched_tokens=4, max_num_seqs=8)
    for seed in range(3):
        engine.add(text(seed, 4), 1)
    engine.step()
    assert reasons(engine) == {"next_step": 2}
    engine.drain()


def test_blocks_hold_up_who_needs_them_and_state_slots_everybody():
    engine = Engine(usable_blocks=4, ranks=1, block_size=4)
    engine.add(text(0, 9), 4, params=IGNORE_EOS)
    engine.add(text(1, 12), 1)
    small = engine.add(text(2, 2), 1)
    engine.step()
    assert reasons(engine) == {"capacity": 1}
    assert small.is_finished
    engine.drain()
    engine = Engine(num_state_slots=2, state_unit=8)
    engine.add(text(0, 3), 4)
    engine.add(text(1, 3), 4)
    engine.step()
    assert reasons(engine) == {"capacity": 1}
    engine.drain()


def test_who_stands_behind_one_that_was_overtaken_enough_waits_for_its_blocks():
    engine = Engine(usable_blocks=4, ranks=1, block_size=4, max_model_len=17)
    engine.add(text(0, 4), 12, params=IGNORE_EOS)
    engine.step()
    big = engine.add(text(1, 16), 1)
    for seed in range(MAX_OVERTAKES):
        engine.add(text(2 + seed, 1), 1)
        engine.step()
    assert big.num_overtakes == MAX_OVERTAKES
    engine.add(text(90, 1), 1)
    engine.step()
    assert reasons(engine) == {"capacity": 2}
    engine.drain()


def test_a_preemption_holds_all_starts_back():
    engine = Engine(usable_blocks=4, ranks=1, block_size=2, caching=False)
    engine.add(text(0, 3), 6, params=IGNORE_EOS)
    young = engine.add(text(1, 3), 6, params=IGNORE_EOS)
    while not young.num_preemptions:
        engine.step()
    assert reasons(engine) == {"capacity": 1}
    engine.drain()
