from __future__ import annotations

from heddle.kvcache.hits import GroupHit, NoHit, PrefixHit

WHOLE = PrefixHit(unit=8, num_tokens=16, groups=(GroupHit((3, 4)), GroupHit((0, 7))))
FINE = PrefixHit(
    unit=8,
    num_tokens=22,
    groups=(GroupHit((3, 4), 5, 6), GroupHit((0, 7), 9, 6)),
    whole=WHOLE,
)


def test_without_a_copy_a_hit_is_the_best_of_whole_blocks():
    less = FINE.without_copy()
    assert (less.num_tokens, less.num_dropped, less.groups) == (16, 6, WHOLE.groups)
    assert (less.num_copied, FINE.num_copied) == (0, 6)
    assert less.without_copy() is less
    assert FINE.explain() == less.explain() == ""


def test_a_hit_that_was_only_a_copy_says_how_much_it_was():
    nothing = PrefixHit(unit=64, groups=(GroupHit(),), reason=NoHit.EVICTED)
    copied = PrefixHit(unit=64, num_tokens=37, groups=(GroupHit((), 3, 37),), whole=nothing)
    assert copied.without_copy().explain() == "shared less than the unit: 37 shared, unit 64"


def test_holes_are_not_shared_and_the_source_of_a_copy_is():
    assert GroupHit((0, 7, 0, 8), 9, 6).shared == (7, 8, 9)
    assert GroupHit((0, 7), 9, 0).shared == (7,)


def test_each_reason_for_nothing_is_a_sentence_of_the_fixed_list():
    said = {reason: PrefixHit(unit=64, reason=reason, num_dropped=37).explain() for reason in NoHit}
    assert said == {
        NoHit.NOTHING_SHARED: "nothing shared",
        NoHit.BELOW_UNIT: "shared less than the unit: 37 shared, unit 64",
        NoHit.EVICTED: "evicted",
        NoHit.EXCLUDED: "feature excluded",
    }
