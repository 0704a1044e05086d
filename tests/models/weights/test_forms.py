"""A form is chosen per matrix; what does not fit stays float32, and says so."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from heddle.kernels.linear.base import PackedPart, Segments, SegmentsPart
from heddle.kernels.linear.panels import Panels
from heddle.kernels.linear.quantized import BytePanels, NibblePanels
from heddle.kernels.registry import create_kernels
from heddle.models.weights.forms import MatrixPart, QuantizationName, WeightForms, weight_of
from heddle.models.weights.gguf_source import GgufSource
from heddle.models.weights.loader import WeightLoader
from heddle.models.weights.memory import META, HeaderSource, MemorySource
from heddle.models.weights.source import WeightSource
from tests.support.checkpoints import CPU
from tests.support.gguf_files import Kind, write_matrix

NAME = "model.layers.0.mlp.down_proj.weight"
ROWS, COLS = 40, 256


def forms_of(
    source: WeightSource, quantization: QuantizationName, device: torch.device = CPU
) -> WeightForms:
    return WeightForms(create_kernels("numba"), torch.float32, device, source, quantization)


def write_file(folder: Path, kind: Kind) -> GgufSource:
    weight = np.random.default_rng(1).normal(size=(ROWS, COLS)).astype(np.float32)
    return GgufSource(write_matrix(folder / "m.gguf", gguf.quantize(weight, kind), kind))


def test_torch_and_wider_types_get_plain_weights() -> None:
    source = MemorySource({})
    for kernels, dtype in (("torch", torch.float32), ("numba", torch.float64)):
        forms = WeightForms(create_kernels(kernels), dtype, CPU, source)
        target = forms.create([MatrixPart("a", 3), MatrixPart("b", 4)], 6, (2, 6))
        weight = weight_of(target)
        assert isinstance(weight, torch.Tensor)
        assert (weight.shape, weight.dtype) == ((4, 7), dtype)
        assert weight.is_contiguous()


@pytest.mark.parametrize(
    ("kind", "form"),
    [(Kind.Q4_0, NibblePanels), (Kind.Q4_1, NibblePanels), (Kind.Q8_0, BytePanels)],
)
@pytest.mark.parametrize("span", [(0, COLS), (64, 192)])
def test_kept_slices_are_what_dequantising_gives(
    tmp_path: Path, kind: Kind, form: type, span: tuple[int, int]
) -> None:
    source = write_file(tmp_path, kind)
    loader = WeightLoader(
        source, torch.float32, CPU, kernels=create_kernels("numba"), quantization="keep"
    )
    target = loader.matrix([MatrixPart(NAME, 24)], COLS, span)
    assert isinstance(target, PackedPart)
    loader.fill(target[:20], NAME, (ROWS, COLS), (10, 30), span)
    weight = weight_of(target)
    assert isinstance(weight, form)
    assert not isinstance(weight, torch.Tensor)
    expected = torch.zeros(24, span[1] - span[0])
    expected[:20] = source.read(NAME, (10, 30), span)
    assert torch.equal(weight.matrix().t(), expected)
    assert not loader.forms.reasons


def test_a_group_that_ranks_would_cut_stays_whole_in_float32(tmp_path: Path) -> None:
    forms = forms_of(write_file(tmp_path, Kind.Q4_1), "keep")
    target = forms.create([MatrixPart(NAME, ROWS)], COLS, (16, 128))
    assert isinstance(weight_of(target), Panels)
    assert forms.reasons == {NAME: "has inputs 16 to 128 here, which cut groups of 32"}


def test_what_is_not_packed_stays_in_float32(tmp_path: Path) -> None:
    for source, held in (
        (write_file(tmp_path, Kind.Q5_0), "Q5_0"),
        (MemorySource({NAME: torch.zeros(ROWS, COLS)}), "no form of GGML"),
    ):
        forms = forms_of(source, "keep")
        assert isinstance(weight_of(forms.create([MatrixPart(NAME, 8)], COLS, (0, COLS))), Panels)
        assert list(forms.reasons) == [NAME]
        assert forms.reasons[NAME].startswith(f"is stored as {held}; Q4_0, Q4_1, ")


def test_parts_of_several_kinds_lie_side_by_side() -> None:
    weights = {"a": torch.randn(5, 64), "b": torch.randn(7, 64), "c": torch.randn(4, 64)}
    kinds = {"a": "int8", "b": "int8", "c": "float"}

    class Mixed(WeightForms):
        def _form(self, name: str, num_inputs: int, inputs: tuple[int, int]) -> str:
            return kinds[name]

    forms = Mixed(create_kernels("numba"), torch.float32, CPU, MemorySource(weights), "int8")
    target = forms.create([MatrixPart(k, len(w)) for k, w in weights.items()], 64, (0, 64))
    assert isinstance(target, SegmentsPart)
    for span, name in (((0, 5), "a"), ((5, 12), "b"), ((12, 16), "c")):
        target[slice(*span)].copy_(weights[name])
    weight = weight_of(target)
    assert isinstance(weight, Segments)
    assert [type(part) for part in weight.parts] == [BytePanels, Panels]
    found, exact = weight.matrix().t(), torch.cat(list(weights.values()))
    assert torch.equal(found[12:], exact[12:])
    assert 0 < (found[:12] - exact[:12]).abs().max() < exact.abs().max() / 254 * 1.01


def test_a_rank_without_memory_weighs_what_a_loaded_one_does(tmp_path: Path) -> None:
    source = write_file(tmp_path, Kind.Q4_1)
    names: tuple[QuantizationName, ...] = ("none", "int8", "keep")
    sizes = []
    for quantization in names:
        found = []
        for given, device in ((source, CPU), (HeaderSource(source), META)):
            loader = WeightLoader(
                given,
                torch.float32,
                device,
                kernels=create_kernels("numba"),
                quantization=quantization,
            )
            target = loader.matrix([MatrixPart(NAME, ROWS)], COLS)
            loader.fill(target, NAME, (ROWS, COLS))  # type: ignore[arg-type]
            assert isinstance(target, PackedPart)
            data = target.weight.data  # type: ignore[attr-defined]
            assert data.device.type == device.type
            found.append(data.untyped_storage().nbytes())
        assert found[0] == found[1]
        sizes.append(found[0])
    assert sizes == [48 * 256 * 4, 48 * 256 * 17 // 16, 48 * 256 * 5 // 8]
