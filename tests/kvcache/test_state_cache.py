"""Recurrent states through the manager: slots, snapshots, drafts."""

from __future__ import annotations

from heddle.config.visibility import Visibility
from heddle.kvcache.hits import NoHit
from heddle.kvcache.manager import KVCacheManager
from tests.kvcache.test_manager import IDENTITY, make_cache, run_once, spec, start

PROMPT = list(range(20))


def make(slots=5, per_sequence=1, unit=4, **options):
    return make_cache(
        40, num_state_slots=slots, states_per_sequence=per_sequence, state_unit=unit, **options
    )


def run_to(cache, sequence, tokens, ends):
    for end in ends:
        cache.commit(sequence, tokens, end)


def test_a_hit_ends_where_a_snapshot_lies():
    cache = make()
    sequence, _ = start(cache, PROMPT)
    run_to(cache, sequence, PROMPT, [7, 12, 20])
    # The step that ended at 7 left none; 12 and 20 are borders.
    for length, expected in ((8, 0), (12, 0), (13, 12), (20, 12), (21, 20)):
        hit = cache.lookup(cache.new_sequence(), [*PROMPT, 99][:length])
        assert hit.num_tokens == expected
        assert (hit.snapshot > 0) == (expected > 0)


def test_a_prefix_without_a_snapshot_says_how_much_was_shared():
    cache = make(unit=8)
    run_once(cache, PROMPT[:6])
    hit = cache.lookup(cache.new_sequence(), [*PROMPT[:5], 99, 98])
    assert hit.explain() == "shared less than the unit: 5 shared, unit 8"
    run_once(cache, PROMPT)
    hit = cache.lookup(cache.new_sequence(), PROMPT[:15])
    assert hit.num_tokens == 6, "the exact end of the first sequence"


def test_the_exact_end_is_kept_by_handing_the_slot_over():
    cache = make(slots=3)
    sequence, _ = start(cache, PROMPT[:6])
    (_, (slot,)) = sequence.state_use(1)
    run_to(cache, sequence, PROMPT[:6], [6])
    assert cache.take_edits().state_copies == ()
    cache.release(sequence, PROMPT[:6], 6)
    hit = cache.lookup(cache.new_sequence(), PROMPT[:8])
    assert (hit.num_tokens, hit.snapshot) == (6, slot)


def test_resuming_copies_the_snapshot_and_leaves_it():
    cache = make()
    run_once(cache, PROMPT[:6])
    first, hit = start(cache, PROMPT[:8])
    second, again = start(cache, [*PROMPT[:6], 77])
    assert hit.snapshot == again.snapshot > 0
    sources = [sequence.state_use(1)[0] for sequence in (first, second)]
    assert cache.take_edits().state_copies == tuple((hit.snapshot, slot) for slot in sources)
    assert hit.snapshot not in sources


def test_the_last_snapshot_is_taken_over_where_no_other_slot_is_left():
    cache = make(slots=2)
    run_once(cache, PROMPT[:6])
    sequence, hit = start(cache, PROMPT[:8])
    assert sequence.state_use(1) == (hit.snapshot, (hit.snapshot,))
    assert cache.take_edits().state_copies == ()
    cache.audit([sequence])


def test_a_snapshot_that_is_taken_over_is_the_current_state():
    cache = make(slots=3, per_sequence=2)
    run_once(cache, PROMPT[:6])
    sequence, hit = start(cache, PROMPT[:8])
    source, targets = sequence.state_use(2)
    assert source == targets[0] == hit.snapshot
    assert sorted(targets) == [1, 2]


def test_a_resumed_snapshot_outlives_one_that_nobody_used_since():
    cache = make(slots=4)
    run_once(cache, PROMPT[:6])
    run_once(cache, [50, 51, 52])
    start(cache, PROMPT[:8])  # takes the free slot
    start(cache, [60, 61])  # takes the slot of a snapshot
    assert cache.lookup(cache.new_sequence(), PROMPT[:8]).num_tokens == 6
    assert cache.lookup(cache.new_sequence(), [50, 51, 52, 53]).num_tokens == 0


def test_a_sequence_starts_from_zeros():
    sequence, _ = start(make(), PROMPT)
    source, targets = sequence.state_use(1)
    assert source == 0
    assert len(targets) == 1


def test_the_state_after_the_last_right_draft_is_the_next_source():
    cache = make(slots=4, per_sequence=3)
    sequence, _ = start(cache, PROMPT)
    source, targets = sequence.state_use(3)
    assert source == 0
    assert len(set(targets)) == 3
    cache.commit(sequence, PROMPT, 7, num_accepted=1)
    assert sequence.state_use(1) == (targets[1], (targets[1],))
    cache.commit(sequence, PROMPT, 8)
    source, after = sequence.state_use(3)
    assert source == targets[1]
    assert sorted(after) == sorted(targets)
    cache.commit(sequence, PROMPT, 11, num_accepted=2)
    assert sequence.state_use(1)[0] == after[2]


def test_snapshots_are_of_the_state_that_counts():
    cache = make(slots=6, per_sequence=2)
    sequence, _ = start(cache, PROMPT)
    _, targets = sequence.state_use(2)
    cache.commit(sequence, PROMPT, 8, num_accepted=1)
    ((source, _),) = cache.take_edits().state_copies
    assert source == targets[1]


def test_sequences_wait_for_slots():
    cache = make(slots=5, per_sequence=2)
    first, _ = start(cache, PROMPT)
    second, _ = start(cache, [99, *PROMPT])
    blocks = cache.new_sequence()
    assert not cache.has_free_states
    assert cache.fitting(cache.lookup(blocks, [5, 5]), 2) is None
    cache.release(second, [99, *PROMPT], 0)
    assert cache.fitting(cache.lookup(blocks, [5, 5]), 2) is not None
    cache.audit([first])


def test_a_state_that_has_moved_on_is_not_kept():
    cache = make()
    sequence, _ = start(cache, PROMPT)
    run_to(cache, sequence, PROMPT, [7])
    cache.release(sequence, PROMPT, 7, has_current_state=False)
    assert cache.lookup(cache.new_sequence(), PROMPT[:10]).num_tokens == 0
    cache.audit([])


def test_bad_numbers_take_all_snapshots_of_the_sequence_along():
    cache = make()
    run_once(cache, PROMPT[:6])
    sequence, hit = start(cache, PROMPT)
    assert hit.num_tokens == 6
    run_to(cache, sequence, PROMPT, [12])
    cache.quarantine(sequence)
    assert cache.lookup(cache.new_sequence(), PROMPT).reason is NoHit.NOTHING_SHARED
    cache.audit([])


def make_recurrent():
    return KVCacheManager(
        num_blocks=1, groups=(), identity=IDENTITY, max_step_rows=8, num_state_slots=4, state_unit=4
    )


def test_a_snapshot_that_a_bad_sequence_resumed_is_not_to_be_trusted():
    cache = make_recurrent()
    run_once(cache, PROMPT[:6])
    sequence, hit = start(cache, PROMPT)
    assert hit.num_tokens == 6
    cache.quarantine(sequence)
    assert cache.lookup(cache.new_sequence(), PROMPT).num_tokens == 0
    cache.audit([])


def test_a_model_without_attention_needs_no_blocks():
    cache = make_recurrent()
    sequence, _ = start(cache, PROMPT)
    run_to(cache, sequence, PROMPT, [8, 20])
    assert cache.usable_tokens > 10**12
    assert (cache.layout, sequence.block_tables) == (None, ())
    cache.release(sequence, PROMPT, 20)
    assert cache.lookup(cache.new_sequence(), [*PROMPT, 1]).num_tokens == 20
    assert cache.lookup(cache.new_sequence(), PROMPT).num_tokens == 8
    cache.audit([])


def test_a_hybrid_goes_on_from_a_snapshot_whose_window_survives():
    groups = [spec(ranks=1), spec(Visibility("window", 3), 1, 2)]
    cache = make(groups=groups)
    sequence, _ = start(cache, PROMPT)
    run_to(cache, sequence, PROMPT, [8, 13, 20])
    hit = cache.lookup(cache.new_sequence(), PROMPT[:15])
    assert hit.num_tokens == 8
    assert [block > 0 for block in hit.groups[1].blocks] == [False, False, False, True]
    assert all(hit.groups[0].blocks)
