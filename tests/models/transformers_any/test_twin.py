"""A twin has every kind of layer of its model, and heads that relate as the model's do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from heddle.errors import UnsupportedError
from heddle.models.transformers_any.twin import (
    HEAD_DIM,
    VOCABULARY,
    check_layers,
    chosen_layers,
    twin_config,
    twin_heads,
)
from tests.support.foreign import foreign_config

HEADS = st.tuples(st.integers(1, 16), st.integers(1, 16)).map(
    lambda pair: (pair[0] * pair[1], pair[1])
)


@given(HEADS)
def test_few_heads_with_the_ratio_of_many(heads: tuple[int, int]) -> None:
    num_heads, num_kv_heads = heads
    few, few_kv = twin_heads(num_heads, num_kv_heads)
    assert few <= num_heads
    assert few_kv <= num_kv_heads
    assert few % few_kv == 0
    assert few // few_kv == min(num_heads // num_kv_heads, 4 if few_kv == 1 else 3)
    assert few >= 2 or num_heads == 1


def test_layers_of_every_listed_kind_are_chosen() -> None:
    full, window = "full_attention", "sliding_attention"
    config = foreign_config(
        "cohere2", num_hidden_layers=7, layer_types=[full, full, full, window, full, window, full]
    )
    assert chosen_layers(config) == [0, 1, 3]
    small = twin_config(config)
    assert small.layer_types == [full, full, window]
    assert small.num_hidden_layers == 3
    assert small.vocab_size == VOCABULARY
    assert small.hidden_size == HEAD_DIM * small.num_attention_heads
    assert config.num_hidden_layers == 7


def model_of(*widths: int) -> nn.Module:
    """Layers that differ in a number which construction decided."""
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, width)) for width in widths)
    return model


def test_a_kind_that_the_twin_lacks_is_found() -> None:
    check_layers(model_of(3, 4, 3), model_of(5, 6), [0, 1], "layers")
    with pytest.raises(UnsupportedError, match="layer 2 is built otherwise"):
        check_layers(model_of(3, 4, 5), model_of(5, 6), [0, 1], "layers")
    with pytest.raises(UnsupportedError, match="layers 0 and 2 do not relate"):
        check_layers(model_of(3, 4, 3), model_of(5, 6, 6), [0, 1, 2], "layers")


def test_the_index_of_a_layer_is_no_kind() -> None:
    large = model_of(3, 3)
    for index, layer in enumerate(large.layers):
        layer.layer_idx = index
    check_layers(large, model_of(5), [0], "layers")


def test_special_tokens_lie_in_the_small_vocabulary() -> None:
    config = foreign_config("arcee", eos_token_id=[100, 101])
    small = twin_config(config)
    found = SimpleNamespace(pad=small.pad_token_id, bos=small.bos_token_id, eos=small.eos_token_id)
    assert (found.pad, found.bos, found.eos) == (0, 1, 2)
