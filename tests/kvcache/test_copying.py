"""A copy is told once, and its source is held until its own step has ended."""

from __future__ import annotations

import pytest

from heddle.config.visibility import Visibility
from tests.kvcache.test_manager import make_cache, run_once, spec, start


@pytest.mark.parametrize("rule", [None, Visibility("window", 8)], ids=["full", "window"])
def test_a_source_is_held_from_the_start_to_the_end_of_its_own_step(rule):
    cache = make_cache(9, groups=[spec(rule)] if rule else None)
    run_once(cache, list(range(1, 7)))  # a block of four, and two tokens of another
    first, hit = start(cache, [*range(1, 6), 50])
    assert (hit.num_tokens, hit.num_copied) == (5, 1)
    second, _ = start(cache, [*range(1, 7), 60])
    told = cache.take_edits().copies
    assert [(copy.start, copy.end) for copy in told] == [(4, 5), (4, 6)]
    assert {copy.source_block for copy in told} == {hit.groups[0].copy_source}
    targets = [sequence.block_tables[0][1] for sequence in (first, second)]
    assert [copy.target_block for copy in told] == targets
    assert cache.take_edits().copies == ()
    source = told[0].source_block
    for left, copy in ((2, told[1]), (1, told[0])):
        assert [block for block, _ in cache._copying] == [source] * left
        cache.audit([first, second])
        cache.end_step([copy])
    cache.audit([first, second])
    assert list(cache._copying) == []
    with pytest.raises(ValueError, match="not in list"):
        cache.end_step(told)
