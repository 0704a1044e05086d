"""8-bit floats and integers with a scale per block, per row or per matrix."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.errors import ModelFileError
from tests.support.quantized_files import (
    Matrix,
    check_any_slice,
    compressed,
    fp8,
    open_cases,
    open_parts,
)

N, M = 40, 72


BYTES = {"num_bits": 8, "type": "int"}
FLOATS = {"num_bits": 8, "type": "float"}
CASES = {
    "fp8-block": fp8((16, 32)),
    "fp8-tensor": fp8(None),
    "fp8-row": fp8((1, M), suffix="weight_scale"),
    "ints-row": compressed("int-quantized", **BYTES, strategy="channel"),
    "ints-zero-points": compressed("int-quantized", **BYTES, strategy="channel", symmetric=False),
    "ints-tensor": compressed("int-quantized", **BYTES, strategy="tensor"),
    "ints-group": compressed("int-quantized", **BYTES, strategy="group", group_size=24),
    "floats-row": compressed("float-quantized", **FLOATS, strategy="channel"),
    "floats-block": compressed(
        "float-quantized", **FLOATS, strategy="block", block_structure=[16, 32]
    ),
}


@pytest.fixture(scope="module")
def matrices(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Matrix]:
    return open_cases(tmp_path_factory.mktemp("scaled"), CASES, N, M)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=12)
@given(data=st.data())
def test_any_slice_equals_the_slice_of_the_whole(
    matrices: dict[str, Matrix], name: str, data: st.DataObject
) -> None:
    check_any_slice(matrices[name], data, atol=1e-7)


def test_columns_may_belong_to_groups_in_any_order(tmp_path: Path) -> None:
    config, write = CASES["ints-group"]
    parts, values = write(N, M, 3)
    order = torch.randperm(M, generator=torch.Generator().manual_seed(0))
    parts["weight"] = parts["weight"][:, order].contiguous()
    parts["weight_g_idx"] = (order // 24).to(torch.int32)
    found = open_parts(tmp_path, config, parts).read("x.weight", cols=(5, 60))
    torch.testing.assert_close(found, values[:, order[5:60]], rtol=1e-6, atol=1e-7)


def test_scales_that_do_not_divide_the_matrix_are_named(tmp_path: Path) -> None:
    config, write = CASES["fp8-block"]
    parts, _ = write(N, M, 0)
    parts["weight_scale_inv"] = torch.ones(4, 3)
    with pytest.raises(
        ModelFileError, match=r"x\.weight_scale_inv has shape \(4, 3\), .*16 x 32.*does not have"
    ):
        open_parts(tmp_path, config, parts)


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    config, write = CASES["fp8-block"]
    parts, _ = write(N, M, 0)
    del parts["weight_scale_inv"]
    with pytest.raises(ModelFileError, match=r"safetensors: x\.weight_scale_inv is missing; x\.w"):
        open_parts(tmp_path, config, parts)
