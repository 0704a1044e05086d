from __future__ import annotations

from heddle.kvcache.hits import NoHit, PrefixHit


def test_tokens_are_whole_blocks_plus_the_copied_part():
    hit = PrefixHit(unit=8, blocks=(3, 4), copy_source=5, num_copied=6)
    assert hit.num_tokens == 22
    assert hit.without_copy() == PrefixHit(unit=8, blocks=(3, 4), num_dropped=6)
    assert hit.explain() == ""


def test_each_reason_for_nothing_is_a_sentence_of_the_fixed_list():
    said = {reason: PrefixHit(unit=64, reason=reason, num_dropped=37).explain() for reason in NoHit}
    assert said == {
        NoHit.NOTHING_SHARED: "nothing shared",
        NoHit.BELOW_UNIT: "shared less than the unit: 37 shared, unit 64",
        NoHit.EVICTED: "evicted",
        NoHit.EXCLUDED: "feature excluded",
    }
