"""A part that is missing or does not fit is named with its file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from heddle.errors import ModelFileError
from heddle.models.weights.parts import FLOATS, Parts
from heddle.models.weights.safetensors_source import SafetensorsSource

SHAPE = (256, 300)


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    tensors = {
        "x.weight": torch.zeros(4, 6, dtype=torch.int8),
        "x.scale": torch.ones(2, 3),
        "x.rows": torch.ones(256),
        "x.one": torch.ones(()),
        "x.groups": torch.ones(256, 3),
        "x.shape": torch.tensor([4, 0]),
        "x.words": torch.zeros(4, 5, dtype=torch.int32),
        "x.word": torch.zeros(4, 1, dtype=torch.int32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return Parts(SafetensorsSource(tmp_path), "x.weight")


def test_parts_in_use_are_remembered(parts: Parts) -> None:
    parts.take("x.scale", (2, 3), FLOATS)
    assert parts.optional("x.zeros", FLOATS) is None
    assert parts.first_of(("x.zeros", "x.rows"), FLOATS) == "x.rows"
    assert parts.used == ("x.scale", "x.rows")


@pytest.mark.parametrize(
    ("scale", "expected"),
    [("x.scale", (128, 128)), ("x.rows", (1, 300)), ("x.one", SHAPE), ("x.groups", (1, 100))],
)
def test_the_block_follows_from_the_shape_of_the_scales(
    parts: Parts, scale: str, expected: tuple[int, int]
) -> None:
    assert parts.block_of(scale, SHAPE, [(128, 128)]) == expected


@pytest.mark.parametrize(
    ("columns", "stated", "expected"),
    [(8, (2,), 2), (8, (4,), 4), (8, (4, 8), 4), (4, (8,), 8), (16, (), 2), (4, (2, 8, 8), None)],
)
def test_the_width_is_a_stated_one(
    parts: Parts, columns: int, stated: tuple[int, ...], expected: int | None
) -> None:
    if expected is not None:
        assert parts.bits_of_words("x.word", columns, stated) == expected
        return
    with pytest.raises(ModelFileError, match=r"x\.word has 1 words .* widths of 2, 8 bits"):
        parts.bits_of_words("x.word", columns, stated)


def test_a_width_that_nothing_states_must_be_the_only_one_that_fits(parts: Parts) -> None:
    with pytest.raises(
        ModelFileError,
        match=r"model\.safetensors: x\.word has 1 words .* row of 8 numbers.* widths of 2, 4 bits",
    ):
        parts.bits_of_words("x.word", 8, ())


def test_stated_blocks_that_fit_alike_are_refused(parts: Parts) -> None:
    with pytest.raises(
        ModelFileError, match=r"model\.safetensors: x\.groups has shape .* 1 x 128, 1 x 120 alike"
    ):
        parts.block_of("x.groups", SHAPE, [(1, 128), (1, 64), (1, 120)])


def test_stated_blocks_that_cover_the_same_numbers_are_one(parts: Parts) -> None:
    assert parts.block_of("x.rows", SHAPE, [(1, 512), (1, 300), (1, 1024)]) == (1, 300)
    assert parts.block_of("x.groups", SHAPE, [(1, 128), (1, 64)]) == (1, 128)


def test_what_does_not_fit_is_named(parts: Parts) -> None:
    with pytest.raises(ModelFileError, match=r"model\.safetensors: x\.scale has shape .* \(2, 4\)"):
        parts.take("x.scale", (2, 4), FLOATS)
    with pytest.raises(ModelFileError, match=r"safetensors: x\.zeros is missing; x\.weight is st"):
        parts.first_of(("x.zeros",), FLOATS)
    with pytest.raises(ModelFileError, match=r"x\.scale is stored as F32; I8 was expected"):
        parts.optional("x.scale", ("I8",))
    with pytest.raises(ModelFileError, match=r"x\.rows has shape \(256,\); quantised matrices"):
        parts.matrix_shape("x.rows")
    with pytest.raises(ModelFileError, match=r"x\.shape holds \[4, 0\]"):
        parts.told_shape("x.shape")
    with pytest.raises(ModelFileError, match=r"x\.words has 5 words .* row of 64 numbers"):
        parts.bits_of_words("x.words", 64, ())
    with pytest.raises(
        ModelFileError, match=r"x\.words has 5 words .* row of 20 .* widths of 4 bits"
    ):
        parts.bits_of_words("x.words", 20, (4,))
    with pytest.raises(ModelFileError, match=r"x\.scale has shape \(2, 3\), which x\.weight"):
        parts.block_of("x.scale", SHAPE, [(64, 64)])
