from __future__ import annotations

import dataclasses

import pytest

from heddle.config.model import ModelConfig, SparseConfig
from heddle.layout.cache_rows import CACHE_DTYPES, row_format
from tests.support.models import latent_config, model_config

SPARSE = dataclasses.replace(
    latent_config(), sparse=SparseConfig(num_heads=4, head_dim=128, top_k=8)
)


@pytest.mark.parametrize(
    ("model", "dtype", "element", "width", "row_bytes"),
    [
        (model_config(), "float32", "float32", 128, 512),
        (model_config(), "float64", "float64", 128, 1024),
        (model_config(), "bfloat16", "bfloat16", 128, 256),
        (model_config(), "int8", "uint8", 128 + 2 * 4, 136),
        (latent_config(), "float16", "float16", 576, 1152),
        (latent_config(), "fp8_e4m3", "uint8", 576 + 2 * 4, 584),
        (SPARSE, "float32", "float32", 704, 2816),
        (SPARSE, "int8", "uint8", 704 + 3 * 4, 716),
    ],
)
def test_a_row_is_its_elements_and_a_scale_for_each_part(
    model: ModelConfig, dtype: str, element: str, width: int, row_bytes: int
) -> None:
    found = row_format(model, dtype)
    assert (found.element, found.width, found.row_bytes) == (element, width, row_bytes)


@pytest.mark.parametrize("model", [model_config(), latent_config(), SPARSE])
def test_parts_are_the_whole_row(model: ModelConfig) -> None:
    for dtype in CACHE_DTYPES:
        assert sum(row_format(model, dtype).parts) == model.stored_row_width
