"""Laws: scores follow their formula, and a score has the same bits wherever it is computed."""

from __future__ import annotations

import pytest
import torch

from heddle.attention.sparse.scoring import index_scores, rows_at_once

SHAPES = [(1, 1), (2, 33), (3, 7), (4, 16), (5, 24), (8, 128), (64, 128)]


def draw(num_rows: int, num_keys: int, shape: tuple[int, int], seed: int = 0):  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(seed)
    heads, width = shape
    query = torch.randn(num_rows, heads, width, generator=generator)
    weights = torch.randn(num_rows, heads, generator=generator)
    return query, weights, torch.randn(num_keys, width, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_keys", [0, 1, 127, 128, 129, 300])
def test_scores_follow_their_formula(num_keys: int, dtype: torch.dtype) -> None:
    query, weights, keys = draw(4, num_keys, (5, 24))
    query, keys = query.to(dtype), keys.to(dtype)
    found = index_scores(query, weights, keys, [num_keys] * 4)
    assert found.dtype == torch.float32
    assert found.shape == (4, num_keys)
    for row in range(4):
        products = keys.double() @ query[row].double().T  # [L, Hi]
        expected = products.clamp(min=0) @ weights[row].double()
        torch.testing.assert_close(found[row].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_score_has_the_same_bits_beside_any_other_keys_and_rows(shape: tuple[int, int]) -> None:
    query, weights, keys = draw(9, 515, shape)
    whole = index_scores(query, weights, keys, [515] * 9)
    generator = torch.Generator().manual_seed(1)
    for num_keys in (1, 2, 3, 17, 64, 100, 128, 130, 257):
        rows = torch.randperm(9, generator=generator)[: 1 + num_keys % 9]
        held = torch.randperm(515, generator=generator)[:num_keys]
        part = index_scores(query[rows], weights[rows], keys[held], [num_keys] * len(rows))
        assert torch.equal(part, whole[rows][:, held])


def test_the_memory_layout_of_keys_and_queries_changes_no_bit() -> None:
    query, weights, keys = draw(3, 200, (4, 20))
    stored = torch.full((200, 77), torch.nan)
    stored[:, 57:] = keys
    packed = torch.full((3, 4, 21), torch.nan)
    packed[..., :20] = query
    expected = index_scores(query, weights, keys, [200] * 3)
    assert torch.equal(index_scores(packed[..., :20], weights, stored[:, 57:], [200] * 3), expected)


def test_keys_that_no_row_sees_change_nothing() -> None:
    query, weights, keys = draw(2, 300, (4, 16))
    expected = index_scores(query, weights, keys, [140, 0])
    keys[256:] = torch.nan
    found = index_scores(query, weights, keys, [140, 0])
    assert torch.equal(found[:, :140], expected[:, :140])
    assert (found[1] == 0).all()


def test_few_rows_are_scored_at_once_where_there_are_many_keys() -> None:
    assert rows_at_once(64, 10**6) == 1
    assert rows_at_once(4, 0) > 1000
