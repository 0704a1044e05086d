"""Embeddings are taken as rows of the compute dtype, or refused with what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from heddle.engine.prompt_embeds import embeddings_digest, read_embeddings
from heddle.errors import RequestError

ROWS = torch.arange(12, dtype=torch.float32).view(3, 4) / 7


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_rows_have_the_bytes_of_the_compute_dtype(dtype: str) -> None:
    kind = getattr(torch, dtype)
    found = read_embeddings(ROWS.t().contiguous().t(), 4, dtype)
    assert (found.num_rows, found.row_bytes) == (3, 4 * kind.itemsize)
    rows = torch.frombuffer(bytearray(found.data), dtype=kind).view(3, 4)
    assert torch.equal(rows, ROWS.to(kind))
    assert found.rows(1, 9) == found.data[found.row_bytes :]
    assert found.rows(3, 9) == b""


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[1.0] * 4], "is a tensor, not list"),
        (ROWS.int(), "dtype int32; known: float32"),
        (ROWS.to(torch.complex64), "dtype complex64"),
        (ROWS[:, :3], r"shape \(3, 3\); it must be \[n, 4\]"),
        (ROWS[None], r"shape \(1, 3, 4\)"),
        (ROWS[:0], r"shape \(0, 4\)"),
        (ROWS[0], r"shape \(4,\)"),
        (ROWS.to("meta"), "it must be a dense one on the CPU"),
        (ROWS.to_sparse(), "it must be a dense one on the CPU"),
        (ROWS.masked_fill(ROWS > 1, torch.nan), "NaN or inf in row 2"),
        (ROWS.masked_fill(ROWS == 0, torch.inf), "NaN or inf in row 0"),
    ],
)
def test_anything_else_is_refused(value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_embeddings(value, 4, "float32")


def test_a_number_too_large_for_the_compute_dtype_is_refused() -> None:
    with pytest.raises(RequestError, match="row 2, as float16"):
        read_embeddings(ROWS * torch.tensor([[1.0], [1.0], [1e6]]), 4, "float16")


def test_digests_tell_rows_apart() -> None:
    rows = [read_embeddings(value, 4, "float32") for value in (ROWS, ROWS + 0, -ROWS)]
    first, same, other = map(embeddings_digest, rows)
    assert first == same != other
