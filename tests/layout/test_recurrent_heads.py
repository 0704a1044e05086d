"""Heads, key heads, channels and states of ranks cover the layer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.config.model import RecurrentConfig
from heddle.errors import TopologyError
from heddle.layout.recurrent_heads import RecurrentLayout


def config(num_heads: int, num_key_heads: int, **changes: Any) -> RecurrentConfig:
    settings: dict[str, Any] = {
        "method": "gated_delta",
        "num_heads": num_heads,
        "num_key_heads": num_key_heads,
        "key_dim": 4,
        "value_dim": 3,
        "conv_kernel": 4,
        "norm_groups": num_heads,
    }
    return RecurrentConfig(**settings | changes)


@given(ratio=st.integers(1, 5), num_key_heads=st.integers(1, 5), data=st.data())
def test_each_head_has_one_rank_and_finds_its_key_head(
    ratio: int, num_key_heads: int, data: st.DataObject
) -> None:
    num_heads = ratio * num_key_heads
    tp_size = data.draw(st.integers(1, num_heads))
    layout = RecurrentLayout(config(num_heads, num_key_heads), tp_size)
    seen = []
    for rank in range(tp_size):
        first, last = layout.head_range(rank)
        first_key, last_key = layout.key_range(rank)
        keys = [first_key + index for index in layout.key_index(rank)]
        assert keys == [head // ratio for head in range(first, last)]
        assert set(keys) == set(range(first_key, last_key))
        assert layout.num_channels(rank) == 2 * 4 * (last_key - first_key) + 3 * (last - first)
        assert layout.state_shape(rank) == (last - first, 4, 3)
        seen += range(first, last)
    assert seen == list(range(num_heads))


def test_sizes_of_qwen3_next_80b() -> None:
    layout = RecurrentLayout(config(32, 16, key_dim=128, value_dim=128), 8)
    assert (layout.head_range(3), layout.key_range(3)) == ((12, 16), (6, 8))
    assert layout.history_shape(3) == (3, 2 * 2 * 128 + 4 * 128)
    assert layout.map_width == 2 * 128 * 128
    assert layout.slot_bytes(3, 4, 2) == 4 * 128 * 128 * 4 + 3 * 1024 * 2
    whole = RecurrentLayout(config(32, 16, key_dim=128, value_dim=128), 1)
    assert whole.slot_bytes(0, 4, 2) == 8 * layout.slot_bytes(3, 4, 2)


def test_without_convolution_nothing_is_remembered() -> None:
    layout = RecurrentLayout(config(4, 4, method="lightning", conv_kernel=0), 2)
    assert layout.history_shape(1) == (0, 0)
    assert layout.map_width == 4 * 3 + 1
    assert layout.slot_bytes(1, 4, 4) == 2 * 4 * 3 * 4


@pytest.mark.parametrize(
    ("groups", "tp_size", "sums"), [(6, 4, 0), (3, 3, 0), (3, 2, 3), (1, 1, 0), (1, 2, 1)]
)
def test_a_norm_is_summed_where_a_group_crosses_ranks(groups: int, tp_size: int, sums: int) -> None:
    assert RecurrentLayout(config(6, 1, norm_groups=groups), tp_size).num_norm_sums == sums


def test_a_rank_without_a_head_is_refused() -> None:
    with pytest.raises(TopologyError, match=r"tp_size=5; must be in \[1, 4\]"):
        RecurrentLayout(config(4, 2), 5)
