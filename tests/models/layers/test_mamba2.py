"""Heads of a Mamba-2 layer may be cut anywhere, through the heads that share B, C and a norm."""

from __future__ import annotations

import pytest

from heddle.models.layers.mamba2 import load_mamba2
from tests.support.recurrent_models import check_layer_over_ranks, layer_config


@pytest.mark.parametrize("tp_size", [2, 3, 4, 6])
@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_ranks_add_up_to_the_layer(num_groups: int, tp_size: int) -> None:
    heads, state, value = 6, 4, 3
    config = layer_config(
        method="mamba2",
        num_heads=heads,
        num_key_heads=num_groups,
        key_dim=state,
        value_dim=value,
        conv_kernel=3,
        norm_groups=num_groups,
        has_conv_bias=True,
        has_projection_bias=True,
        time_step_limit=(0.1, 1.5),
    )
    values = heads * value
    channels = values + 2 * num_groups * state
    shapes = {
        "in_proj.weight": (values + channels + heads, 10),
        "in_proj.bias": (values + channels + heads,),
        "conv1d.weight": (channels, 1, 3),
        "conv1d.bias": (channels,),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "D": (heads,),
        "norm.weight": (values,),
        "out_proj.weight": (10, values),
        "out_proj.bias": (10,),
    }
    check_layer_over_ranks(load_mamba2, config, shapes, tp_size)
