"""Heads of a lightning attention layer may be cut anywhere; decays follow the published rule."""

from __future__ import annotations

import pytest
import torch

from heddle.models.layers.lightning import load_lightning, log_decays
from tests.support.recurrent_models import check_layer_over_ranks, layer_config


@pytest.mark.parametrize("tp_size", [2, 3, 4])
def test_ranks_add_up_to_the_layer(tp_size: int) -> None:
    config = layer_config(
        method="lightning", num_heads=6, num_key_heads=6, key_dim=4, value_dim=4, norm_groups=1
    )
    shapes = {
        "qkv_proj.weight": (72, 10),
        "output_gate.weight": (24, 10),
        "norm.weight": (24,),
        "out_proj.weight": (10, 24),
    }
    check_layer_over_ranks(load_lightning, config, shapes, tp_size)


@pytest.mark.parametrize("layer", [0, 1, 4])
def test_decays_are_those_of_transformers(layer: int) -> None:
    from transformers.models.minimax.configuration_minimax import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    config = MiniMaxConfig(hidden_size=24, num_attention_heads=6, num_hidden_layers=5, block_size=4)
    config.layer_types = ["linear_attention"] * 5
    published = MiniMaxLightningAttention(config, layer).slope_rate.flatten()
    found = -log_decays(6, layer, 5)
    assert (found - published).abs().max() <= torch.finfo(torch.float32).eps * found.max()
