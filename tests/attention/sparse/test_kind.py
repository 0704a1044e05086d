"""A stored row of a sparse layer: what a query meets is what it meets without an indexer."""

from __future__ import annotations

import torch

from heddle.attention.base import IndexRows
from heddle.attention.kinds.mla import MLAKind
from heddle.attention.sparse.kind import SparseLatentKind


def test_the_index_key_lies_behind_the_row_and_meets_no_query() -> None:
    query_nope, query_rope = torch.randn(3, 2, 6), torch.randn(3, 2, 4)
    latent, index_key = torch.randn(3, 14), torch.randn(3, 8)
    tensors = (query_nope, query_rope, latent, torch.randn(2, 6, 10), torch.randn(2, 10, 5), 0.3)
    index = IndexRows(torch.randn(3, 1, 8), index_key, torch.randn(3, 1))
    plain, sparse = MLAKind(*tensors), SparseLatentKind(*tensors, index)
    assert torch.equal(sparse.rows[:, 0], torch.cat((latent, index_key), dim=1))
    assert torch.equal(sparse.index_keys(sparse.rows), index_key)
    assert torch.equal(sparse.travelling_query, plain.travelling_query)
    for mine, other in (
        (sparse.stored(sparse.rows), plain.stored(plain.rows)),
        (sparse.expand(sparse.rows), plain.expand(plain.rows)),
    ):
        assert torch.equal(mine[0], other[0])
        assert torch.equal(mine[1], other[1])
