"""Law: the best k of all lists are the best k of all keys, by score and then id."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from heddle.attention.sparse.selection import NO_ID, Candidates, global_top_k, local_top_k

FIRST_ID = 2**24 - 20
"""Neighbouring ids around here and above differ by less than a float32 can tell."""
scores_with_ties = st.sampled_from([-math.inf, -2.5, -0.0, 0.0, 1.0, 1.0 + 2**-23, 3.0])


def best(keys: list[tuple[float, int]], k: int) -> list[int]:
    """Ids of the k best (score, id), by a sort in Python."""
    return [index for _, index in sorted(keys, key=lambda key: (-key[0], key[1]))[:k]]


@st.composite
def sharded_rows(draw: st.DrawFn):  # type: ignore[no-untyped-def]
    """Score table, owner and id of each key, keys that each row sees, ranks, k."""
    num_keys = draw(st.integers(0, 40))
    ranks = draw(st.integers(1, 5))
    num_rows = draw(st.integers(1, 3))
    gaps = draw(st.lists(st.integers(1, 30), min_size=num_keys, max_size=num_keys))
    ids = [FIRST_ID + sum(gaps[: i + 1]) for i in range(num_keys)]
    owners = draw(st.lists(st.integers(0, ranks - 1), min_size=num_keys, max_size=num_keys))
    row = st.lists(scores_with_ties, min_size=num_keys, max_size=num_keys)
    scores = draw(st.lists(row, min_size=num_rows, max_size=num_rows))
    seen = [draw(st.integers(0, num_keys)) for _ in range(num_rows)]
    return scores, ids, owners, seen, ranks, draw(st.integers(1, 12))


def lists_of(scores, ids, owners, seen, rank, k):  # type: ignore[no-untyped-def]
    held = [i for i, owner in enumerate(owners) if owner == rank]
    table = torch.tensor(scores, dtype=torch.float32).reshape(len(scores), len(ids))[:, held]
    visible = torch.tensor([sum(i < end for i in held) for end in seen])
    for row, count in enumerate(visible.tolist()):
        table[row, count:] = math.nan  # nobody may look there
    return local_top_k(table, torch.tensor([ids[i] for i in held], dtype=torch.int32), visible, k)


@given(sharded_rows())
def test_the_choice_over_ranks_equals_one_sort(case) -> None:  # type: ignore[no-untyped-def]
    scores, ids, owners, seen, ranks, k = case
    lists = [lists_of(scores, ids, owners, seen, rank, k) for rank in range(ranks)]
    found = global_top_k(
        Candidates(torch.stack([x.scores for x in lists]), torch.stack([x.ids for x in lists])), k
    )
    assert found.ids.dtype == torch.int32
    for row, end in enumerate(seen):
        expected = best([(scores[row][i], ids[i]) for i in range(end)], k)
        pads = [NO_ID] * (k - len(expected))
        assert found.ids[row].tolist() == expected + pads
        expected_owners = [owners[ids.index(index)] for index in expected]
        assert found.source[row].tolist() == expected_owners + [-1] * len(pads)
        for rank in range(ranks):
            assert bool(found.seen(ranks)[rank, row]) == (rank in expected_owners)


@given(sharded_rows())
def test_a_list_is_the_best_of_its_own_keys(case) -> None:  # type: ignore[no-untyped-def]
    scores, ids, owners, seen, _, k = case
    found = lists_of(scores, ids, owners, seen, 0, k)
    assert found.scores.dtype == torch.float32
    assert found.ids.dtype == torch.int32
    assert found.ids.shape == (len(scores), k)
    assert not (found.scores.signbit() & (found.scores == 0)).any(), "zero has one sign"
    for row, end in enumerate(seen):
        mine = [(scores[row][i], ids[i]) for i in range(end) if owners[i] == 0]
        expected = best(mine, k)
        pads = k - len(expected)
        assert found.ids[row].tolist() == expected + [NO_ID] * pads
        by_id = {index: score for score, index in mine}
        assert found.scores[row].tolist() == [by_id[i] for i in expected] + [-math.inf] * pads


def test_a_broken_score_is_chosen_so_that_its_row_breaks() -> None:
    scores = torch.tensor([[1.0, math.nan, 2.0]])
    found = local_top_k(scores, torch.arange(3, dtype=torch.int32), torch.tensor([3]), 1)
    lists = Candidates(found.scores[None], found.ids[None])
    assert global_top_k(lists, 1).ids.tolist() == [[1]]
