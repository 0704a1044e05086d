from __future__ import annotations

import pytest

from heddle.bench.paged_case import AttentionShape, CaseSize, _model, latent_shape
from heddle.bench.zero_weights import WIDTH, zero_weights

GROUPED = AttentionShape(num_query_heads=4, num_kv_heads=2, head_dim=16)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        pytest.param(
            GROUPED,
            {"q_proj": (64, WIDTH), "k_proj": (32, WIDTH), "o_proj": (WIDTH, 64)},
            id="gqa",
        ),
        pytest.param(
            latent_shape(3),
            {"q_proj": (3 * 72, WIDTH), "kv_b_proj": (3 * 16, 512), "o_proj": (WIDTH, 24)},
            id="mla",
        ),
    ],
)
def test_every_layer_has_its_shapes_and_all_share_one_number(shape, expected):
    found = zero_weights(_model(shape, CaseSize(context=4, num_layers=2)))
    for layer in range(2):
        for name, size in expected.items():
            assert found[f"model.layers.{layer}.self_attn.{name}.weight"].shape == size
    assert {tensor.untyped_storage().nbytes() for tensor in found.values()} == {4}
    assert all((tensor == 0).all() for tensor in found.values())
