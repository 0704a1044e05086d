from __future__ import annotations

import pytest
import torch

from heddle.attention.quantized_rows import QuantizedRows
from heddle.attention.row_codec import PlainRows, create_row_codec
from heddle.layout.cache_rows import CACHE_DTYPES, RowFormat


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_stored_rows_have_the_bytes_of_their_format(dtype: str) -> None:
    rows = RowFormat(dtype, (6, 2))
    codec = create_row_codec(rows)
    stored = codec.encode(torch.randn(5, 3, 8))
    assert stored.shape == (5, 3, codec.width)
    assert stored.dtype == codec.element == getattr(torch, rows.element)
    assert stored[0, 0].numel() * stored.element_size() == rows.row_bytes
    found = codec.decode(stored, torch.float64)
    assert found.shape == (5, 3, 8)
    assert found.dtype == torch.float64


def test_rows_of_the_type_of_the_cache_are_not_copied() -> None:
    codec = create_row_codec(RowFormat("float32", (4,)))
    assert isinstance(codec, PlainRows)
    rows = torch.randn(2, 4)
    assert codec.encode(rows).data_ptr() == rows.data_ptr()
    assert codec.decode(rows, torch.float32).data_ptr() == rows.data_ptr()


def test_a_narrow_plain_cache_rounds_once() -> None:
    codec = create_row_codec(RowFormat("bfloat16", (4,)))
    rows = torch.randn(3, 4)
    assert torch.equal(codec.decode(codec.encode(rows), torch.float32), rows.bfloat16().float())
    assert isinstance(create_row_codec(RowFormat("int8", (4,))), QuantizedRows)
