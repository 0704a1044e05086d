"""AWQ and GPTQ: random codes read as the numbers they stand for, in any slice."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.errors import ModelFileError
from tests.support.quantized_files import (
    Matrix,
    awq,
    check_any_slice,
    gptq,
    open_cases,
    open_parts,
)

N, M = 32, 96
CASES = {
    "awq": awq(16),
    "awq-all": awq(-1),
    "gptq-4": gptq(4, 32),
    "gptq-4-all": gptq(4, -1),
    "gptq-4-act-order": gptq(4, 16, acts_in_order=False),
    "gptq-4-v2": gptq(4, 32, form="gptq_v2"),
    "gptq-2": gptq(2, 48, acts_in_order=False),
    "gptq-8": gptq(8, 32),
}


@pytest.fixture(scope="module")
def matrices(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Matrix]:
    return open_cases(tmp_path_factory.mktemp("grouped"), CASES, N, M)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=12)
@given(data=st.data())
def test_any_slice_equals_the_slice_of_the_whole(
    matrices: dict[str, Matrix], name: str, data: st.DataObject
) -> None:
    check_any_slice(matrices[name], data, atol=0)


def test_a_missing_part_is_named_with_its_file(tmp_path: Path) -> None:
    config, write = CASES["awq"]
    parts, _ = write(N, M, 0)
    del parts["qzeros"]
    with pytest.raises(ModelFileError, match=r"model\.safetensors: x\.qzeros is missing; x\.weig"):
        open_parts(tmp_path, config, parts)


def test_a_group_that_is_not_there_is_named(tmp_path: Path) -> None:
    config, write = CASES["gptq-4"]
    parts, _ = write(N, M, 0)
    parts["g_idx"][5] = 3
    source = open_parts(tmp_path, config, parts)
    source.read("x.weight", cols=(6, M))
    with pytest.raises(ModelFileError, match=r"x\.g_idx holds a group outside \[0, 3\)"):
        source.read("x.weight")


@pytest.mark.parametrize("part", ["qzeros", "scales", "g_idx"])
def test_parts_of_another_size_are_refused(tmp_path: Path, part: str) -> None:
    config, write = CASES["gptq-4"]
    parts, _ = write(N, M, 0)
    parts[part] = parts[part][:-1].clone()
    with pytest.raises(ModelFileError, match=rf"x\.{part} has shape .* was expected"):
        open_parts(tmp_path, config, parts)
