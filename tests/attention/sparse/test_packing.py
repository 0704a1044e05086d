"""Law: what is packed comes back bit for bit."""

from __future__ import annotations

import pytest
import torch

from heddle.attention.base import IndexRows
from heddle.attention.sparse.packing import (
    pack_candidates,
    pack_queries,
    unpack_candidates,
    unpack_queries,
)
from heddle.attention.sparse.selection import Candidates


def test_candidates_return_bit_for_bit() -> None:
    scores = torch.tensor([[1.5, -0.0, torch.nan], [torch.inf, -torch.inf, 1e-40]])
    ids = torch.tensor([[0, 2**24 + 1, 2**31 - 2], [5, -1, 7]], dtype=torch.int32)
    found = unpack_candidates(torch.stack([pack_candidates(Candidates(scores, ids))] * 2))
    for rank in range(2):
        assert torch.equal(found.scores[rank].view(torch.int32), scores.view(torch.int32))
        assert torch.equal(found.ids[rank], ids)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_queries_return_bit_for_bit(dtype: str) -> None:
    kind = getattr(torch, dtype)
    weight_kind = torch.float64 if dtype == "float64" else torch.float32
    query, key = torch.randn(3, 2, 6).to(kind), torch.randn(3, 6).to(kind)
    weights = torch.randn(3, 2).to(weight_kind)
    packed = pack_queries(IndexRows(query, key, weights))
    found_query, found_weights = unpack_queries(packed, 6)
    assert torch.equal(found_query, query)
    assert found_weights.dtype == weight_kind
    assert torch.equal(found_weights, weights)
