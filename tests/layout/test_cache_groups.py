from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from heddle.config.model import LayerKind
from heddle.config.visibility import FULL, Visibility
from heddle.layout.cache_groups import (
    MAX_GROUPS,
    CacheGroup,
    create_cache_groups,
    max_stage_tensors,
    page_layers,
)
from heddle.layout.kv import KVLayout
from tests.support.models import model_config

WINDOW = Visibility("window", 40)
KINDS = st.sampled_from(
    [
        LayerKind(),
        LayerKind(visibility=WINDOW),
        LayerKind(visibility=Visibility("chunk", 512)),
        LayerKind(mixer="recurrent"),
    ]
)


def groups_of(kinds: list[LayerKind], dcp_size: int = 2) -> tuple[CacheGroup, ...]:
    model = model_config(num_layers=len(kinds), layer_kinds=tuple(kinds))
    return create_cache_groups(model, dcp_size, 16)


def test_a_model_of_one_kind_is_one_group() -> None:
    groups = create_cache_groups(model_config(), 4, 16)
    assert groups == (CacheGroup(visibility=FULL, layers=tuple(range(30)), world_size=4),)


def test_the_table_of_the_module() -> None:
    full, window = LayerKind(), LayerKind(visibility=WINDOW)
    groups = groups_of([full, window, window, window] * 2)
    assert [group.layers for group in groups] == [(0, 4), (1, 2), (3, 5), (6, 7)]
    assert [group.world_size for group in groups] == [2, 1, 1, 1]  # 40 < 2 virtual blocks of 32


@given(st.lists(KINDS, min_size=1, max_size=24))
def test_each_attention_layer_is_in_one_group_and_pages_have_one_size(
    kinds: list[LayerKind],
) -> None:
    groups = groups_of(kinds)
    attention = [layer for layer, kind in enumerate(kinds) if kind.mixer == "attention"]
    assert sorted(layer for group in groups for layer in group.layers) == attention
    assert len(groups) <= MAX_GROUPS
    assert all(
        kinds[layer].visibility == group.visibility for group in groups for layer in group.layers
    )
    sizes = [len(group.layers) for group in groups]
    for at, group in enumerate(groups[:-1]):
        if groups[at + 1].visibility == group.visibility:
            assert sizes[at] == max(sizes), "only the last group of a rule may be short"
    if any(kind.visibility.is_full and kind.mixer == "attention" for kind in kinds):
        assert groups[0].visibility.is_full


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_no_other_page_wastes_less(counts: list[int]) -> None:
    def waste(size: int) -> int:
        return sum(-(-count // size) * size for count in counts)

    size = page_layers(counts)
    allowed = [s for s in range(1, 41) if sum(-(-count // s) for count in counts) <= MAX_GROUPS]
    assert size in allowed
    assert waste(size) == min(waste(s) for s in allowed)


def test_a_group_of_one_rank_has_no_start_rank() -> None:
    alone = CacheGroup(visibility=WINDOW, layers=(1,), world_size=1)
    shared = CacheGroup(visibility=FULL, layers=(0,), world_size=4)
    assert alone.layout(2, 16, 3) == KVLayout(1, 2, 16, 0)
    assert shared.layout(2, 16, 3) == KVLayout(4, 2, 16, 3)


@given(st.lists(KINDS, min_size=1, max_size=16), st.integers(1, 6))
def test_a_stage_needs_a_tensor_for_each_of_its_layers_in_a_group(
    kinds: list[LayerKind], num_stages: int
) -> None:
    groups = groups_of(kinds)
    count = len(kinds)
    most = 0
    for stage in range(num_stages):
        own = set(range(count * stage // num_stages, count * (stage + 1) // num_stages))
        most = max([most, *(len(own & set(group.layers)) for group in groups)])
    assert max_stage_tensors(groups, count, num_stages) == most
