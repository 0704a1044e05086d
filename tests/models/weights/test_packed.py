"""Packed integers of compressed-tensors, written and decompressed by that library."""

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
    open_cases,
    open_parts,
)

N, M = 21, 72
FORM = "pack-quantized"
NIBBLES = {"num_bits": 4, "type": "int"}
CASES = {
    "4-group": compressed(FORM, **NIBBLES, strategy="group", group_size=24),
    "4-group-zero-points": compressed(
        FORM, **NIBBLES, strategy="group", group_size=24, symmetric=False
    ),
    "4-row": compressed(FORM, **NIBBLES, strategy="channel"),
    "4-row-zero-points": compressed(FORM, **NIBBLES, strategy="channel", symmetric=False),
    "8-group": compressed(FORM, num_bits=8, type="int", strategy="group", group_size=18),
    "2-row": compressed(FORM, num_bits=2, type="int", strategy="channel"),
}


@pytest.fixture(scope="module")
def matrices(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Matrix]:
    return open_cases(tmp_path_factory.mktemp("packed"), CASES, N, M)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=12)
@given(data=st.data())
def test_any_slice_equals_the_slice_of_the_whole(
    matrices: dict[str, Matrix], name: str, data: st.DataObject
) -> None:
    check_any_slice(matrices[name], data, atol=1e-7)


@pytest.mark.parametrize("bits", [2, 4])
def test_a_narrow_matrix_has_the_width_that_the_file_states(tmp_path: Path, bits: int) -> None:
    config, write = compressed(FORM, num_bits=bits, type="int", strategy="channel")
    parts, values = write(N, 8, 3)  # a row is one word in either width
    found = open_parts(tmp_path, config, parts).read("x.weight")
    torch.testing.assert_close(found, values, rtol=1e-6, atol=1e-7)


def test_a_narrow_matrix_of_a_width_that_the_file_leaves_open_is_refused(tmp_path: Path) -> None:
    config, write = CASES["4-row"]
    parts, _ = write(N, 8, 3)
    with pytest.raises(ModelFileError, match=r"model\.safetensors: x\.weight_packed .* 2, 4 bits"):
        open_parts(tmp_path, {**config, "config_groups": {}}, parts)


def test_words_that_do_not_make_the_told_shape_are_named(tmp_path: Path) -> None:
    config, write = CASES["4-group"]
    parts, _ = write(N, M, 0)
    parts["weight_shape"] = torch.tensor([N, 100])
    with pytest.raises(ModelFileError, match=r"x\.weight_packed has 9 words .* row of 100 numbers"):
        open_parts(tmp_path, config, parts)


def test_packed_weights_of_another_dtype_are_named(tmp_path: Path) -> None:
    config, write = CASES["4-group"]
    parts, _ = write(N, M, 0)
    parts["weight_packed"] = parts["weight_packed"].to(torch.int64)
    with pytest.raises(ModelFileError, match=r"x\.weight_packed is stored as I64; I32 was expec"):
        open_parts(tmp_path, config, parts)
