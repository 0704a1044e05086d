from __future__ import annotations

from itertools import product

from heddle.config.visibility import FULL, Visibility
from heddle.kvcache.groups import GroupSpec, create_group_specs
from heddle.layout.cache_groups import CacheGroup
from heddle.layout.kv import KVLayout


def test_specs_follow_the_groups_of_a_model():
    window = Visibility("window", 8)
    groups = [
        CacheGroup(visibility=FULL, layers=(0, 2), world_size=4),
        CacheGroup(visibility=window, layers=(1, 3), world_size=1),
    ]
    specs = create_group_specs(groups, interleave_size=2, block_size=8)
    assert specs == (GroupSpec(FULL, KVLayout(4, 2, 8)), GroupSpec(window, KVLayout(1, 2, 8)))
    assert [spec.unit for spec in specs] == [32, 8]
    assert [spec.start_rank(3) for spec in specs] == [3, 0]
    assert [spec.layout_at(3).start_rank for spec in specs] == [3, 0]


def test_whatever_changes_the_meaning_of_a_row_changes_the_name():
    rules = [FULL, Visibility("window", 8), Visibility("window", 9), Visibility("chunk", 8)]
    rules.append(Visibility("window", 8, num_first=1))
    layouts = [KVLayout(2, 1, 8), KVLayout(4, 1, 8), KVLayout(2, 2, 8), KVLayout(2, 1, 4)]
    places = list(product(rules, layouts, (0, 1), (0, 1)))
    names = {
        GroupSpec(rule, layout).describe(index, start_rank)
        for rule, layout, index, start_rank in places
    }
    assert len(names) == len(places)
