from __future__ import annotations

import pytest

from heddle.config.visibility import Visibility
from tests.kvcache.test_manager import make_cache, run_once, spec, start


def test_an_owner_that_the_books_do_not_know_is_found():
    cache = make_cache(9)
    sequence, _ = start(cache, [1, 2, 3])
    cache.audit([sequence])
    with pytest.raises(AssertionError, match=r"block \d counts 1 owners, has 0"):
        cache.audit([])
    cache.release(sequence, [1, 2, 3], 0)
    sequence.chains[0].block_table.append(1)
    with pytest.raises(AssertionError, match=r"block \d counts 0 owners, has 1"):
        cache.audit([sequence])


@pytest.mark.parametrize("rule", [None, Visibility("window", 6)])
def test_pins_own_blocks_and_promises(rule):
    cache = make_cache(9, groups=[spec(rule)] if rule else None, max_pinned_tokens=16)
    tokens = [1, 2, 3, 4, 5]
    run_once(cache, tokens)
    cache.pin(tokens, until=1.0)
    cache.audit([])
    block, _ = next(iter(cache._pins))
    cache._pins._pinned.pop(block)
    with pytest.raises(AssertionError, match=f"block {block} counts 1 owners, has 0"):
        cache.audit([])
