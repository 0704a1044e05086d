from __future__ import annotations

import numpy as np
import pytest
import torch

from heddle.attention.backends import blocked as module
from heddle.attention.backends.blocked import blocked
from tests.support.oracle import dense_attention


@pytest.mark.parametrize("max_scores", [1, 24, 60, 1 << 22])
@pytest.mark.parametrize("visible", [[7, 7, 7, 7], [0, 3, 7, 1], [4, 5, 6, 7], [0, 0, 0, 1]])
def test_the_size_of_blocks_has_no_effect(monkeypatch, max_scores, visible):
    monkeypatch.setattr(module, "MAX_SCORES", max_scores)
    monkeypatch.setattr(module, "MIN_BLOCK_KEYS", 2)
    calls = []
    dense = module._dense

    def counted(query, key, value, sees):
        calls.append(query.shape[1] * key.shape[0])
        return dense(query, key, value, sees)

    monkeypatch.setattr(module, "_dense", counted)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn((4, 2, 3, 5), generator=generator, dtype=torch.float64)
    stored = torch.randn((9, 2, 5), generator=generator, dtype=torch.float64)
    state = blocked(query, stored, stored[..., :4], np.array(visible), 0.6)
    out, lse = dense_attention(
        query.flatten(1, 2), stored, stored[..., :4], [0, 0, 0, 1, 1, 1], visible, 0.6
    )
    np.testing.assert_allclose(state.out.numpy(), out, rtol=0, atol=1e-12)
    np.testing.assert_allclose(state.lse.numpy(), lse, rtol=0, atol=1e-12)
    assert calls
    # A block never holds more than asked, or one row of the smallest block.
    assert max(calls) * 2 <= max(max_scores, 2 * 3 * 2)


def test_memory_is_bounded_by_blocks_not_by_keys(monkeypatch):
    largest = []
    dense = module._dense

    def watched(query, key, value, sees):
        largest.append(query.shape[0] * query.shape[1] * key.shape[0])
        return dense(query, key, value, sees)

    monkeypatch.setattr(module, "_dense", watched)
    monkeypatch.setattr(module, "MAX_SCORES", 1 << 18)
    stored = torch.zeros(1, 1, 8).expand(5_000, 1, 8)
    blocked(torch.zeros(40, 1, 16, 8), stored, stored[..., :4], np.full(40, 5_000), 1.0)
    assert len(largest) > 10
    assert max(largest) <= 1 << 18
