"""4-bit floats of experts, against the dequantiser of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from heddle.errors import ModelFileError
from heddle.models.weights.dequantized import DequantizedSource
from tests.support.quantized_files import open_parts

X, N, M = 3, 20, 96
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def draw() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (X, N, M // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (X, N, M // 32), generator=generator, dtype=torch.uint8)
    return {"gate_up_proj_blocks": blocks, "gate_up_proj_scales": scales}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[DequantizedSource, torch.Tensor]:
    parts = draw()
    values = convert_moe_packed_tensors(*parts.values(), dtype=torch.float32)
    return open_parts(tmp_path_factory.mktemp("fp4"), CONFIG, parts), values


@settings(max_examples=12)
@given(data=st.data())
def test_any_slice_equals_the_slice_of_the_whole(
    stored: tuple[DequantizedSource, torch.Tensor], data: st.DataObject
) -> None:
    source, values = stored
    assert source.names() == ("x.gate_up_proj",)
    assert source.shape("x.gate_up_proj") == tuple(values.shape) == (X, M, N)
    assert values.unique().numel() > 100
    spans = [
        tuple(sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))))
        for size in (X, M, N)
    ]
    part = source.read("x.gate_up_proj", *spans)
    assert part.dtype == torch.float32
    assert torch.equal(part, values[tuple(slice(*span) for span in spans)])


def test_scales_of_another_shape_are_named(tmp_path: Path) -> None:
    parts = draw()
    parts["gate_up_proj_scales"] = parts["gate_up_proj_scales"][..., :-1].contiguous()
    with pytest.raises(ModelFileError, match=r"x\.gate_up_proj_scales has shape \(3, 20, 2\)"):
        open_parts(tmp_path, CONFIG, parts)
