"""Heads of a gated delta layer may be cut anywhere, through the value heads of a key head, too."""

from __future__ import annotations

import pytest

from heddle.models.layers.gated_delta import load_gated_delta
from tests.support.recurrent_models import check_layer_over_ranks, layer_config


@pytest.mark.parametrize("tp_size", [2, 3, 4, 6])
@pytest.mark.parametrize("num_key_heads", [1, 2, 6])
def test_ranks_add_up_to_the_layer(num_key_heads: int, tp_size: int) -> None:
    heads, key, value = 6, 4, 3
    config = layer_config(
        method="gated_delta",
        num_heads=heads,
        num_key_heads=num_key_heads,
        key_dim=key,
        value_dim=value,
        conv_kernel=4,
        norm_groups=heads,
    )
    keys, values = num_key_heads * key, heads * value
    shapes = {
        "in_proj_qkvz.weight": (2 * keys + 2 * values, 10),
        "in_proj_ba.weight": (2 * heads, 10),
        "conv1d.weight": (2 * keys + values, 1, 4),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (value,),
        "out_proj.weight": (10, values),
    }
    check_layer_over_ranks(load_gated_delta, config, shapes, tp_size)
