"""What a configuration says about its layers."""

from __future__ import annotations

from dataclasses import replace

from heddle.config.model import ATTENTION, LayerKind, MoEConfig
from heddle.config.visibility import Visibility
from tests.support.models import model_config

MIXTURE = MoEConfig(
    num_experts=4,
    num_experts_per_token=2,
    expert_intermediate_size=10,
    scoring="softmax",
    normalize_top_k=True,
)


def test_layers_are_full_attention_unless_they_are_told_apart() -> None:
    window = LayerKind(visibility=Visibility("window", 8))
    assert model_config(num_layers=2).kind_of(1) == ATTENTION
    told = model_config(num_layers=2, layer_kinds=(ATTENTION, window))
    assert [told.kind_of(layer) for layer in range(2)] == [ATTENTION, window]


def test_layers_are_mixtures_unless_they_are_first_or_listed() -> None:
    mixture = replace(MIXTURE, first_dense_layers=2, dense_layers=(3,))
    assert [layer for layer in range(6) if mixture.has_experts(layer)] == [2, 4, 5]


def test_the_shared_block_has_a_width_of_its_own_or_that_of_several_experts() -> None:
    assert MIXTURE.shared_width == 0
    assert replace(MIXTURE, num_shared_experts=3).shared_width == 30
    assert replace(MIXTURE, shared_intermediate_size=7).shared_width == 7
