"""What is lost by a byte an element, and what is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heddle.attention.quantized_rows import QuantizedRows
from heddle.layout.cache_rows import QUANTIZED, RowFormat
from tests.support.quantized import e4m3_numbers, rounded

PARTS = (5, 3)
WIDTH = sum(PARTS)
LARGEST = float(np.finfo(np.float32).max)
TINY = float(np.finfo(np.float32).tiny)

row = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=8, max_size=8)
ordinary = st.lists(
    st.floats(-1e6, 1e6, width=32).filter(lambda x: x == 0 or abs(x) > 1e-6), min_size=8, max_size=8
)
dtypes = st.sampled_from(QUANTIZED)


def codec(dtype: str, parts: tuple[int, ...] = PARTS) -> QuantizedRows:
    return QuantizedRows(RowFormat(dtype, parts))


def returned(dtype: str, rows: torch.Tensor, parts: tuple[int, ...] = PARTS) -> torch.Tensor:
    made = codec(dtype, parts)
    return made.decode(made.encode(rows), torch.float32)


def scales(stored: torch.Tensor) -> torch.Tensor:
    """Of each element, read off the bytes."""
    found = torch.from_numpy(stored.numpy()[..., WIDTH:].copy().view(np.float32))
    return found.repeat_interleave(torch.tensor(PARTS), dim=-1)


@given(row)
def test_an_int8_element_is_off_by_half_a_scale_at_most(values: list[float]) -> None:
    rows = torch.tensor([values])
    stored = codec("int8").encode(rows)
    scale = scales(stored).double()
    found = codec("int8").decode(stored, torch.float32).double()
    assert found.isfinite().all()
    # Beside half a scale, only what float32 rounds in the quotient and in the product of up to 127.
    error = (found - rows.double()).abs()
    assert (error <= scale * (0.5 + 127 * 2**-22)).all()


@given(row)
def test_an_fp8_element_keeps_three_bits_of_mantissa(values: list[float]) -> None:
    rows = torch.tensor([values])
    stored = codec("fp8_e4m3").encode(rows)
    found = codec("fp8_e4m3").decode(stored, torch.float32).double()
    assert found.isfinite().all()
    bound = torch.maximum(rows.double().abs() / 16, scales(stored).double() / 1024)
    assert ((found - rows.double()).abs() <= bound * (1 + 2**-18)).all()


@given(
    st.lists(ordinary, min_size=1, max_size=3),
    dtypes,
    st.sampled_from([(5, 3), (4, 4), (2, 2, 4), (3, 3, 2), (8,)]),
)
def test_rows_come_back_as_the_oracle_rounds_them(
    values: list[list[float]], dtype: str, parts: tuple[int, ...]
) -> None:
    rows = torch.tensor(values)
    expected = torch.cat(
        [rounded(part, part.shape[-1], dtype) for part in rows.split(parts, dim=-1)], dim=-1
    )
    assert torch.equal(returned(dtype, rows, parts), expected)


@given(st.lists(row, min_size=2, max_size=6), dtypes, st.data())
def test_the_bytes_of_a_row_depend_on_that_row_alone(
    values: list[list[float]], dtype: str, data: st.DataObject
) -> None:
    rows = torch.tensor(values)
    whole = codec(dtype).encode(rows)
    kept = data.draw(st.lists(st.integers(0, len(values) - 1), min_size=1))
    assert torch.equal(codec(dtype).encode(rows[kept]), whole[kept])
    alone = torch.stack([codec(dtype).encode(one) for one in rows])
    assert torch.equal(alone, whole)
    wide = codec(dtype).encode(rows.double())
    assert torch.equal(wide, whole)


@given(row, dtypes, st.integers(0, 7), st.sampled_from([torch.nan, torch.inf, -torch.inf]))
def test_a_broken_element_breaks_its_part_and_no_other(
    values: list[float], dtype: str, place: int, broken: float
) -> None:
    fine, rows = torch.tensor([values]), torch.tensor([values])
    rows[0, place] = broken
    found, expected = returned(dtype, rows), returned(dtype, fine)
    is_broken = slice(0, 5) if place < 5 else slice(5, 8)
    assert found[0, is_broken].isnan().all()
    other = slice(5, 8) if place < 5 else slice(0, 5)
    assert torch.equal(found[0, other], expected[0, other])


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("size", [0.0, 1e-45, TINY / 2, TINY, 1.0, LARGEST / 2, LARGEST])
@pytest.mark.parametrize("compute", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_of_every_size_stay_finite(dtype: str, size: float, compute: torch.dtype) -> None:
    rows = torch.tensor([[size, -size, size / 2, 0.0, 0.0, 0.0, size, -size]])
    made = codec(dtype)
    found = made.decode(made.encode(rows), torch.float32)
    assert found.isfinite().all()
    assert torch.equal(found.sign() * found.sign(), (found != 0).float())
    if size >= 1.0:  # the largest element of a part is a code of its own
        assert ((found[0, [0, 1, 6, 7]] / rows[0, [0, 1, 6, 7]] - 1).abs() < 2**-19).all()
    if size < LARGEST:
        assert made.decode(made.encode(rows.to(compute)), compute).isfinite().all()


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_bytes_of_zero_mean_zeros(dtype: str) -> None:
    """A block that was wiped, and the padding of a message."""
    stored = torch.zeros(3, 2, WIDTH + 8, dtype=torch.uint8)
    assert torch.equal(codec(dtype).decode(stored, torch.float32), torch.zeros(3, 2, WIDTH))
    assert codec(dtype).decode(stored[:0], torch.float32).shape == (0, 2, WIDTH)
    assert (codec(dtype).encode(torch.zeros(3, WIDTH))[:, :WIDTH] == 0).all()


def test_every_code_of_fp8_is_the_number_of_the_format() -> None:
    numbers = torch.from_numpy(e4m3_numbers()).float()
    stored = torch.zeros(2, 127 + 4, dtype=torch.uint8)
    stored[0, :127] = torch.arange(127)
    stored[1, :127] = torch.arange(127) + 128
    stored[:, 127:] = torch.tensor([1.0]).view(torch.uint8)
    found = codec("fp8_e4m3", (127,)).decode(stored, torch.float32)
    assert torch.equal(found, torch.stack([numbers, -numbers]))


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_rows_that_came_back_can_be_kept_again(dtype: str) -> None:
    """Nothing is lost a second time, beyond what float32 rounds in a scale."""
    rows = torch.randn(50, 2, WIDTH, generator=torch.Generator().manual_seed(1))
    once = returned(dtype, rows)
    assert (returned(dtype, once) - once).abs().max() <= 2**-22 * once.abs().max()
