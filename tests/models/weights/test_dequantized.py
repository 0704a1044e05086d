"""What is not quantised passes through; what only serving needs is left out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from heddle.models.config_fields import Fields
from heddle.models.config_quantization import Quantization, read_quantization
from heddle.models.weights.dequantized import DequantizedSource
from heddle.models.weights.quantized import dequantize
from heddle.models.weights.safetensors_source import SafetensorsSource
from heddle.models.weights.source import Span
from tests.support.quantized_files import Writer, awq, fp8, gptq

CODES = torch.arange(-6, 6).view(3, 4).to(torch.float8_e4m3fn)


@pytest.fixture
def source(tmp_path: Path) -> DequantizedSource:
    tensors = {
        "x.weight": CODES,
        "x.weight_scale": torch.tensor(0.5),
        "x.input_scale": torch.ones(()),
        "attn.k_scale": torch.ones(()),
        "norm.weight": torch.ones(4, dtype=torch.bfloat16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return dequantize(SafetensorsSource(tmp_path), Quantization(method="fp8"))


def test_names_are_those_that_a_model_asks_for(source: DequantizedSource) -> None:
    assert set(source.names()) == {"x.weight", "norm.weight"}
    assert source.shape("x.weight") == (3, 4)
    assert source.location("x.weight").endswith("(there x.weight, x.weight_scale)")
    assert source.location("norm.weight").endswith("model.safetensors")


def test_plain_tensors_keep_their_dtype(source: DequantizedSource) -> None:
    assert source.read("norm.weight", (1, 3)).dtype == torch.bfloat16
    source.prefetch("norm.weight")
    source.prefetch("x.weight")
    assert source.read("x.weight", (1, 3), (0, 2)).tolist() == [[-1, -0.5], [1, 1.5]]


def test_an_empty_range_is_empty(source: DequantizedSource) -> None:
    assert source.read("x.weight", (2, 2)).shape == (0, 4)
    assert source.read("x.weight", None, (1, 1)).shape == (3, 0)


class Counted:
    """A `StoredSource` that notes how many elements of each tensor were read."""

    def __init__(self, source: SafetensorsSource) -> None:
        self._source = source
        self.elements_read: Counter[str] = Counter()

    def __getattr__(self, name: str) -> object:
        return getattr(self._source, name)

    def read_stored(self, name: str, *spans: Span | None) -> torch.Tensor:
        part = self._source.read_stored(name, *spans)
        self.elements_read[name] += part.numel()
        return part


@pytest.mark.parametrize(
    ("config", "write", "expected"),
    [
        # 8 of 32 rows, columns 24 to 56 of 96: words and groups that they touch, and no more.
        (*gptq(4, 32), {"qweight": 4 * 8, "qzeros": 2, "scales": 2 * 8, "g_idx": 2 * 32}),
        (*awq(32), {"qweight": 32, "qzeros": 2, "scales": 2 * 8}),
        (*fp8((16, 16)), {"weight": 8 * 32, "weight_scale_inv": 3}),
    ],
    ids=["gptq", "awq", "fp8"],
)
def test_a_slice_reads_the_words_and_groups_that_it_touches(
    tmp_path: Path, config: dict[str, Any], write: Writer, expected: dict[str, int]
) -> None:
    parts, values = write(32, 96, 0)
    save_file({f"x.{key}": part for key, part in parts.items()}, tmp_path / "model.safetensors")
    quantization = read_quantization(Fields(tmp_path, {"quantization_config": config}))
    assert quantization is not None
    counted = Counted(SafetensorsSource(tmp_path))
    found = dequantize(counted, quantization).read("x.weight", (16, 24), (24, 56))  # type: ignore[arg-type]
    torch.testing.assert_close(found, values[16:24, 24:56], rtol=1e-6, atol=0)
    assert counted.elements_read == {f"x.{key}": count for key, count in expected.items()}
