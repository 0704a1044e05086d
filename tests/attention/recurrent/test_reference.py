"""The plain form is the recurrence as written, in float64 to the last digits."""

from __future__ import annotations

import pytest
import torch

from heddle.attention.recurrent.reference import scan_tokens
from tests.attention.recurrent.test_chunked import HEADS, KEY, VALUE, draw


@pytest.mark.parametrize("is_delta", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 2, 40])
def test_token_by_token(tokens: int, is_delta: bool) -> None:
    terms, out, states = draw(11, tokens + 2, is_delta)
    start = states[2][None]
    found, state = scan_tokens(terms.pick(slice(2, None)).batched(), start)
    assert found.shape == (1, tokens, HEADS, VALUE)
    assert state.shape == (1, HEADS, KEY, VALUE)
    assert torch.allclose(found[0], out[2:], rtol=0, atol=1e-13)
    assert torch.allclose(state[0], states[-1], rtol=0, atol=1e-13)
    assert torch.equal(start, states[2][None])
