"""Several steps under way: who may run, who may be preempted, who keeps what."""

from __future__ import annotations

import pytest

from tests.scheduler.harness import Engine, golden
from tests.scheduler.test_scheduler import IGNORE_EOS, never, text


def ids(batch):
    return [part.request.request_id for part in batch.parts]


def test_decodes_are_dealt_evenly_to_the_places():
    engine = Engine(num_places=2)
    for seed in range(5):
        engine.add(text(seed, 2), 9, params=IGNORE_EOS)
    engine.step()  # the starts are one step
    first, second = engine.submit(), engine.submit()
    assert (ids(first), ids(second)) == ([0, 1, 2], [3, 4])
    assert engine.submit() is None
    engine.collect()
    assert ids(engine.submit()) == [0, 1, 2]
    engine.drain()


def test_a_request_is_in_one_step_at_a_time():
    engine = Engine(num_places=3, max_num_batched_tokens=8)
    engine.add(text(0, 20), 2)
    engine.add(text(1, 20), 2)
    assert ids(engine.submit()) == [0]
    assert ids(engine.submit()) == [1]
    assert engine.submit() is None
    engine.add(text(2, 3), 2)
    assert ids(engine.submit()) == [2]
    engine.drain()


def test_prompts_under_way_hold_their_prefill_slots():
    engine = Engine(num_places=2, max_num_batched_tokens=8, max_num_partial_prefills=1)
    engine.add(text(0, 30), 1)
    assert ids(engine.submit()) == [0]
    engine.add(text(1, 30), 1)
    assert engine.submit() is None
    engine.drain()


def test_what_runs_is_not_preempted_and_the_decode_waits_for_it():
    engine = Engine(num_places=2, usable_blocks=4, ranks=1, block_size=4)
    older = engine.add(text(0, 7), 9, params=IGNORE_EOS)
    engine.step()
    assert ids(engine.submit()) == [0]  # its position 7, the last of two blocks
    younger = engine.add(text(1, 8), 4, params=IGNORE_EOS)
    assert ids(engine.submit()) == [1]
    engine.collect()
    assert (older.num_tokens, engine.cache.num_available_blocks) == (9, 0)
    assert engine.submit() is None, "the younger one holds what it needs, and is under way"
    assert (older.num_preemptions, younger.num_preemptions) == (0, 0)
    engine.collect()
    batch = engine.submit()
    assert (ids(batch), batch.preempted) == ([0], (1,))
    engine.drain()
    assert older.output_token_ids == golden(text(0, 7), 9, never)
    assert younger.output_token_ids == golden(text(1, 8), 4, never)


@pytest.mark.parametrize("num_collected", [0, 1])
def test_blocks_of_an_aborted_request_wait_for_its_own_step(num_collected):
    engine = Engine(num_places=2, ranks=1)
    victims = [engine.add(text(seed, 6), 5, params=IGNORE_EOS) for seed in range(2)]
    engine.step()
    engine.submit()
    engine.submit()
    for _ in range(num_collected):
        engine.collect()
    for victim in victims:
        engine.scheduler.finish(victim.request_id, "abort", None)
    engine.scheduler.audit()
    held = [bool(victim.block_tables[0]) for victim in victims]
    assert held == [num_collected == 0, True]
    engine.collect()
    assert [bool(victim.block_tables[0]) for victim in victims] == [False, num_collected == 0]
    engine.drain()


def test_sources_of_copies_are_held_until_their_own_step_ends():
    engine = Engine(num_places=2, usable_blocks=7, ranks=1)
    engine.add(text(0, 6), 1)
    engine.drain()
    engine.add([*text(0, 6), 7, 8], 1)
    first = engine.submit()
    engine.add([*text(0, 5), 9], 1)
    second = engine.submit()
    assert first.copies[0].source_block == second.copies[0].source_block
    engine.collect()
    engine.scheduler.audit()
    assert engine.cache._pool.references(second.copies[0].source_block) > 0
    engine.drain()


def test_one_that_fails_takes_others_along_wherever_they_are():
    engine = Engine(num_places=2, ranks=1, max_num_seqs=3)
    for seed in range(4):
        engine.add(text(seed, 6), 5, params=IGNORE_EOS)
    engine.step()
    engine.submit()
    engine.submit()
    bad, twin, waiting = (engine.requests[at] for at in (0, 2, 3))
    blocks = set(twin.block_tables[0])
    assert waiting.num_computed_tokens == 0
    assert engine.collect(failed=[0, 2, 3]) == [bad]
    assert [r.finish_reason for r in (bad, twin, waiting)] == ["error"] * 3
    assert twin.block_tables[0], "its own step is under way"
    engine.collect()
    assert twin.block_tables == ([],)
    again = engine.add(text(2, 6), 5, params=IGNORE_EOS)
    engine.drain()
    assert again.num_cached_tokens == 0
    assert blocks <= {block for batch in engine.batches for block in batch.wiped_blocks}
    assert engine.requests[1].output_token_ids == golden(text(1, 6), 5, never)
