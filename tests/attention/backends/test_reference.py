from __future__ import annotations

import math

import numpy as np
import torch

from heddle.attention.backends.reference import ReferenceBackend
from heddle.layout.heads import HeadRun


def test_two_keys_by_hand():
    # Scores ln 1 and ln 3 weigh 1 : 3, so (2 + 18) / 4 = 5 and ln 4. Lane 1 is a pad.
    query = torch.tensor([[[1.0], [7.0]], [[1.0], [7.0]]])
    key = torch.tensor([[[0.0]], [[math.log(3)]]])
    value = torch.tensor([[[2.0]], [[6.0]]])
    state = ReferenceBackend().attend(
        query, key, value, [HeadRun(0, 0, 1)], np.array([2, 1]), scale=1.0
    )
    torch.testing.assert_close(state.out[..., 0], torch.tensor([[5.0, 0.0], [2.0, 0.0]]))
    expected = torch.tensor([[math.log(4), -math.inf], [0.0, -math.inf]])
    torch.testing.assert_close(state.lse, expected)


def test_sums_are_at_least_float32():
    half = torch.ones(1, 1, 4, dtype=torch.bfloat16)
    state = ReferenceBackend().attend(half, half, half, [HeadRun(0, 0, 1)], 1, 1.0)
    assert state.out.dtype == torch.float32
    wide = half.double()
    state = ReferenceBackend().attend(wide, half, half, [HeadRun(0, 0, 1)], 1, 1.0)
    assert state.out.dtype == torch.float64
