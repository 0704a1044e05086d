"""Budgets by simulation: plants of known cost, with and without noise, and steps of a scheduler."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.config import SamplingParams
from heddle.scheduler.batch import ScheduledBatch, ScheduledPart
from heddle.scheduler.pacing import (
    AIM,
    GAIN,
    MAX_JUMP,
    MIN_PROMPT_ROWS,
    Pacer,
    StepLoad,
    attention_length,
    row_weight,
)
from tests.scheduler.harness import Engine

TARGET = 0.1
MAX_ROWS = 512
FAR = 1e12  # keys cost nothing
SETTLED = 100  # steps after which a plant with a fixed part below half of the target is known

PER_ROW = st.floats(1e-5, 1e-2)
FIXED = st.floats(0.0, 0.5)  # share of what a step is meant to take


def make(target=TARGET, max_rows=MAX_ROWS, length=FAR):
    return Pacer(target_seconds=target, max_rows=max_rows, attention_length=length)


def work_behind(num_context, length=FAR):
    """Of rows of one prompt."""
    return lambda num_rows: num_rows * row_weight(num_context + num_rows / 2, length)


def prompt_step(num_rows, num_context=0, length=FAR):
    return StepLoad(num_rows + 1, num_rows, work_behind(num_context, length)(num_rows))


DECODE = StepLoad(num_rows=1, num_prompt_rows=0, work=0.0)


def run(pacer, plant, num_steps, noise=lambda at: 1.0):
    """Let a plant of rows -> seconds follow the budgets; (rows, seconds) of each step."""
    told = []
    for at in range(num_steps):
        rows = pacer.budget(float)
        seconds = plant(rows) * noise(at)
        pacer.observe(prompt_step(rows), seconds)
        told.append((rows, seconds))
    return told


@given(PER_ROW, FIXED, st.booleans(), st.floats(0.0, 1.0), st.floats(1e-6, 1.0))
def test_steps_of_a_steady_plant_settle_below_the_target_and_stay(
    per_row, fixed, is_fixed_known, wrong_fixed, first_sample
):
    """Whatever was learned before: a fixed part that is right or wrong, and any cost of rows."""
    pacer = make()
    fixed *= AIM * TARGET
    pacer.observe(DECODE, fixed if is_fixed_known and fixed else max(wrong_fixed * TARGET, 1e-9))
    pacer.observe(prompt_step(10), first_sample)
    told = run(pacer, lambda rows: fixed + per_row * rows, 3 * SETTLED)[SETTLED:]
    assert {rows for rows, _ in told} <= {told[-1][0], told[-1][0] - MIN_PROMPT_ROWS,
                                          told[-1][0] + MIN_PROMPT_ROWS}  # fmt: skip
    for rows, seconds in told:
        assert MIN_PROMPT_ROWS <= rows <= MAX_ROWS
        if fixed + MIN_PROMPT_ROWS * per_row <= AIM * TARGET:
            assert seconds <= TARGET
        else:
            assert rows == MIN_PROMPT_ROWS
    room = AIM * TARGET - fixed
    if per_row * 4 * MIN_PROMPT_ROWS < room:  # rows are not given away either
        assert told[-1][0] >= min(MAX_ROWS, 0.7 * room / per_row)


@given(PER_ROW, FIXED, st.floats(1e-6, 1.0))
def test_a_budget_goes_to_its_end_from_one_side(per_row, fixed, first_sample):
    pacer = make()
    fixed *= AIM * TARGET
    pacer.observe(prompt_step(10), first_sample)
    rows = [rows for rows, _ in run(pacer, lambda rows: fixed + per_row * rows, 200)]
    # A last unit more or less: budgets are whole units, so the plant may be met between two.
    rises = [after - before for before, after in pairwise(rows)]
    assert all(rise >= -MIN_PROMPT_ROWS for rise in rises) or all(
        rise <= MIN_PROMPT_ROWS for rise in rises
    )


@given(
    st.floats(1e-4, 1e-3),
    st.lists(st.floats(0.8, 1.2), min_size=20, max_size=20),
    st.floats(1e-5, 1e-1),
)
def test_noise_moves_the_budget_no_further_than_itself(per_row, noise, first_sample):
    """The stated band: +-20 % in seconds is +-20 % in the average, once the first guess is gone."""
    pacer = make()
    pacer.observe(prompt_step(10), first_sample)
    run(pacer, lambda rows: per_row * rows, SETTLED)
    exact = AIM * TARGET / per_row
    for rows, _ in run(pacer, lambda rows: per_row * rows, 60, lambda at: noise[at % 20]):
        assert rows <= max(exact / 0.8 * 1.01, MIN_PROMPT_ROWS)
        assert rows > min(exact / 1.2 * 0.99, MAX_ROWS) - MIN_PROMPT_ROWS


def test_after_the_cost_of_rows_has_changed_the_budget_follows():
    pacer = make()
    pacer.observe(DECODE, 0.02)
    assert run(pacer, lambda rows: 0.02 + 0.0005 * rows, 40)[-1][0] == 112
    later = run(pacer, lambda rows: 0.02 + 0.002 * rows, 40)
    assert [seconds > TARGET for _, seconds in later[:2]] == [True, True]
    assert all(seconds <= TARGET for _, seconds in later[8:])
    assert later[-1][0] == 16


def test_one_pause_is_not_a_trend():
    pacer = make()
    before = run(pacer, lambda rows: 0.0003 * rows, 60)[-1][0]
    pacer.observe(prompt_step(before), 60.0)
    bound = before / (1 + GAIN * (MAX_JUMP - 1))
    assert bound - MIN_PROMPT_ROWS < pacer.budget(float) <= bound
    assert run(pacer, lambda rows: 0.0003 * rows, 30)[-1][0] >= before - MIN_PROMPT_ROWS


def test_rows_that_read_more_are_fewer():
    pacer = make(length=1000.0)
    for _ in range(5):
        pacer.observe(prompt_step(100, 0, 1000.0), 0.05)
    near, far = (pacer.budget(work_behind(context, 1000.0)) for context in (0, 9000))
    assert 5 < near / far < 11
    with_cost = far * row_weight(9000 + far / 2, 1000.0) * 0.05 / (100 * row_weight(50, 1000.0))
    assert with_cost <= AIM * TARGET


def test_the_prediction_holds_all_along_a_growing_prompt():
    """The plant of `attention_length`: no step of a prompt of 20,000 tokens is too long."""
    length = attention_length(512)
    pacer = make(length=length)
    pacer.observe(DECODE, 0.01)
    done, num_steps = 0, 0
    while done < 20_000:
        rows = pacer.budget(work_behind(done, length))
        seconds = 0.01 + 0.0002 * rows * row_weight(done + rows / 2, length)
        pacer.observe(prompt_step(rows, done, length), seconds)
        assert seconds <= TARGET
        done, num_steps = done + rows, num_steps + 1
    fewest = 0.0002 * 20_000 * row_weight(10_000, length) / (AIM * TARGET - 0.01)
    assert num_steps < 1.2 * fewest


def test_without_a_target_rows_have_no_bound_but_the_step():
    pacer = make(target=None)
    assert pacer.budget(float) == MAX_ROWS
    pacer.observe(prompt_step(10), 100.0)
    assert pacer.budget(float) == MAX_ROWS
    assert pacer.rows_per_second == pytest.approx(0.1)


def test_a_step_smaller_than_the_least_budget_is_all_there_is():
    pacer = make(max_rows=7)
    assert pacer.budget(float) == 7
    pacer.observe(prompt_step(7), 100.0)
    assert pacer.budget(float) == 7


def test_empty_steps_and_clocks_that_stand_teach_nothing():
    pacer = make()
    pacer.observe(StepLoad(0, 0, 0.0), 5.0)
    pacer.observe(prompt_step(10), 0.0)
    assert (pacer.budget(float), pacer.rows_per_second) == (MIN_PROMPT_ROWS, None)


def test_the_rate_follows_what_was_computed_lately():
    pacer = make()
    for _ in range(50):
        pacer.observe(prompt_step(100), 1.0)
    assert pacer.rows_per_second == pytest.approx(100)
    for _ in range(50):
        pacer.observe(prompt_step(100), 0.1)
        pacer.observe(DECODE, 1.0)  # prompts did not wait for it
    assert pacer.rows_per_second == pytest.approx(1000, rel=0.01)


def part_of(request, start, rows, *, samples):
    return ScheduledPart(
        request=request, num_computed_tokens=start, num_scheduled_tokens=rows, samples=samples
    )


def test_the_load_of_a_step_is_its_prompt_rows_by_what_they_read():
    request = Engine().add(range(40), 4)
    decode = part_of(request, 30, 1, samples=True)
    piece = part_of(request, 10, 4, samples=False)
    last = part_of(request, 38, 2, samples=True)
    load = StepLoad.of(ScheduledBatch(parts=(decode, piece, last)), attention_length=10.0)
    assert load == (7, 6, 4 * (1 + 12 / 10) + 2 * (1 + 39 / 10))
    single = part_of(request, 5, 1, samples=False)
    assert StepLoad.of(ScheduledBatch(parts=(single,)), 10.0).num_prompt_rows == 1
    assert StepLoad.of(ScheduledBatch(parts=(decode,)), 10.0) == (1, 0, 0.0)


# In a scheduler.


def paced_engine(budget_seconds=0.02, **limits):
    engine = Engine(max_num_batched_tokens=64, usable_blocks=400, **limits)
    engine.pace(make(target=budget_seconds, max_rows=64))
    return engine


def text(seed, length):
    return [1000 * (seed + 1) + at for at in range(length)]


def test_prompts_get_whole_steps_until_a_decode_runs():
    engine = paced_engine()
    long = engine.add(text(0, 400), 1)
    engine.step()
    assert engine.batches[-1].num_rows == 64
    engine.add(text(1, 3), 8, params=SamplingParams(ignore_eos=True))
    engine.step()
    while not engine.requests[1].is_finished:
        before = long.num_computed_tokens
        engine.step()
        assert 1 <= long.num_computed_tokens - before <= MIN_PROMPT_ROWS
    engine.step()
    assert engine.batches[-1].num_rows == 64
    engine.drain()


def test_the_first_prompt_gets_on_however_small_the_budget():
    engine = paced_engine(max_num_partial_prefills=20, max_num_seqs=30, max_model_len=1000)
    decode = engine.add(text(50, 1), 40, params=SamplingParams(ignore_eos=True))
    engine.step()
    first = engine.add(text(0, 900), 1)
    for seed in range(1, 12):
        engine.add(text(seed, 100 - seed), 1)
    num_steps = 0
    while not decode.is_finished and not first.is_finished:
        num_tokens, num_computed = len(decode.output_token_ids), first.num_computed_tokens
        engine.step()
        assert len(decode.output_token_ids) == num_tokens + 1
        assert first.num_computed_tokens > num_computed
        num_steps += 1
    assert num_steps > 30
    engine.drain()


def test_a_budget_counts_what_each_prompt_reads():
    """Half of the rows belong to a prompt that reads little, so there are more of them."""
    rows = []
    for late in (300, 4):
        engine = Engine(max_num_batched_tokens=256, usable_blocks=1000, max_model_len=3000)
        engine.pace(make(target=0.1, max_rows=256, length=100.0))
        engine.add(text(0, 1), 60, params=SamplingParams(ignore_eos=True))
        engine.add(text(1, 2000), 1)
        for _ in range(10):
            engine.step()
        engine.add(text(2, late), 1)
        engine.step()
        engine.step()
        rows.append(engine.batches[-1].num_rows - 1)
        engine.drain()
    assert rows[0] > rows[1]


@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(1, 6)), min_size=1, max_size=8),
    st.integers(1, 64),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_whatever_the_budget_no_decode_waits_and_all_end(sizes, max_rows, partial, num_places):
    engine = Engine(
        max_num_batched_tokens=max_rows,
        max_num_partial_prefills=partial,
        usable_blocks=200,
        num_places=num_places,
    )
    engine.pace(make(target=0.02, max_rows=max_rows))
    for at, (length, outputs) in enumerate(sizes):
        engine.add(text(at, length), outputs)
    engine.drain()
    assert all(request.finish_reason for request in engine.requests.values())
