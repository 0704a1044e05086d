from __future__ import annotations

import math

import pytest
import torch

from heddle.attention.backends import flash as module
from heddle.attention.backends.flash import SPLIT_KEYS, flash


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(query, key, value, is_causal):
    scores = torch.einsum("rkgd,lkd->rkgl", query, key) * 0.3
    if is_causal:
        above = torch.ones(len(query), len(key)).triu(1).bool()
        scores = scores.masked_fill(above[:, None, None], -math.inf)
    out = torch.einsum("rkgl,lkd->rkgd", torch.softmax(scores, -1), value)
    return out, torch.logsumexp(scores, -1)


@pytest.mark.parametrize(
    ("rows", "keys", "is_causal"),
    [
        (1, 1, False),
        (1, 9, False),
        (5, 9, False),
        (6, 6, True),
        (600, 600, True),
        (1, SPLIT_KEYS, False),
        (3, SPLIT_KEYS + 3, False),
        (9, SPLIT_KEYS + 1, False),
    ],
)
def test_the_kernel_gives_natural_lse_per_head_without_repeated_keys(rows, keys, is_causal):
    query, key, value = draw(rows, 2, 3, 8), draw(keys, 2, 8, seed=1), draw(keys, 2, 8, seed=2)
    state = flash(query, key, value, 0.3, is_causal=is_causal)
    out, lse = dense(query, key, value, is_causal)
    torch.testing.assert_close(state.out, out.flatten(1, 2), rtol=0, atol=1e-12)
    torch.testing.assert_close(state.lse, lse.flatten(1, 2), rtol=0, atol=1e-12)


@pytest.mark.parametrize("keys", [1, 2, 3, 5, 8, SPLIT_KEYS + 1])
@pytest.mark.parametrize("rows", [1, 4])
def test_wholly_poisoned_keys_are_doubted_or_nan(rows, keys):
    """Of few keys that are all NaN the kernel says (0, 0): the state of one key with value 0."""
    query, key, value = draw(rows, 1, 1, 8), draw(keys, 1, 8), draw(keys, 1, 8)
    key[-1 if keys > SPLIT_KEYS else 0 :] = math.nan
    state = flash(query, key, value, 0.3, is_causal=False)
    assert state is None or state.out.isnan().all()


def test_doubt_is_not_imagined():
    # The kernel's own answer, which `flash` must not hand on.
    query, key = draw(1, 1, 1, 8), torch.full((1, 1, 8), math.nan, dtype=torch.float64)
    value = torch.ones_like(key)
    out, lse = module._kernel(query, key[None], value[None], scale=1.0)
    assert (out == 0).all()
    assert lse.item() == 0
    assert flash(query, key, value, 1.0, is_causal=False) is None
