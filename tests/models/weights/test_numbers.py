"""Plain, packed and spread numbers, cut anywhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from heddle.models.weights.numbers import Grid, PackedNumbers, PlainNumbers, num_words
from heddle.models.weights.safetensors_source import SafetensorsSource


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> SafetensorsSource:
    folder = tmp_path_factory.mktemp("numbers")
    tensors = {
        "matrix": torch.arange(12.0).view(3, 4),
        "vector": torch.tensor([5.0, 6.0, 7.0]),
        "scalar": torch.tensor(9.0),
        "words": torch.tensor([[0x76543210, -1], [0x0FEDCBA9, 0]], dtype=torch.int32),
    }
    save_file(tensors, folder / "model.safetensors")
    return SafetensorsSource(folder)


def test_a_vector_is_a_column_and_a_scalar_a_matrix_of_one(source: SafetensorsSource) -> None:
    assert PlainNumbers(source, "matrix").read((1, 3), (0, 2)).tolist() == [[4, 5], [8, 9]]
    turned = PlainNumbers(source, "matrix", transposed=True)
    assert turned.read((0, 2), (1, 3)).tolist() == [[4, 8], [5, 9]]
    assert PlainNumbers(source, "vector").read((1, 3), (0, 1)).tolist() == [[6], [7]]
    assert PlainNumbers(source, "scalar").read((0, 1), (0, 1)).tolist() == [[9]]


def test_the_first_field_lies_in_the_lowest_bits(source: SafetensorsSource) -> None:
    packed = PackedNumbers(source=source, name="words", bits=4, dim=1)
    assert packed.read((0, 1), (0, 10)).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 15, 15]]
    assert packed.read((1, 2), (3, 5)).tolist() == [[12, 13]]
    signed = PackedNumbers(source=source, name="words", bits=8, dim=1, subtracted=128)
    assert signed.read((0, 1), (2, 5)).tolist() == [[0x54 - 128, 0x76 - 128, 255 - 128]]
    down = PackedNumbers(source=source, name="words", bits=4, dim=0)
    assert down.read((7, 10), (0, 1)).tolist() == [[7], [9], [10]]


def test_an_addition_to_a_word_carries(source: SafetensorsSource) -> None:
    packed = PackedNumbers(source=source, name="words", bits=4, dim=1, added_to_words=0x11111111)
    assert packed.read((0, 1), (8, 16)).tolist() == [[0, 1, 1, 1, 1, 1, 1, 1]]


@given(
    st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda span: span[0] < span[1]),
    st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda span: span[0] < span[1]),
)
def test_a_grid_spreads_a_number_over_its_block(
    source: SafetensorsSource, rows: tuple[int, int], cols: tuple[int, int]
) -> None:
    grid = Grid(numbers=PlainNumbers(source, "matrix"), block=(2, 2), num_groups=4, source=source)
    found = grid.at(rows, cols)
    expected = [[4 * (i // 2) + j // 2 for j in range(*cols)] for i in range(*rows)]
    shape = (rows[1] - rows[0], cols[1] - cols[0])
    assert found.expand(shape).tolist() == expected


def test_words_are_counted_up() -> None:
    assert [num_words(count, 4) for count in (0, 1, 8, 9)] == [0, 1, 1, 2]
