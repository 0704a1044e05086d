"""Key and value side by side, moved only where they are not."""

from __future__ import annotations

import pytest
import torch

from heddle.attention.kinds.gqa import side_by_side

ROWS = torch.arange(3 * 2 * 8.0).view(3, 2, 8)


@pytest.mark.parametrize(
    ("key", "value", "is_moved"),
    [
        (ROWS[..., :4], ROWS[..., 4:], False),
        (ROWS[1:2, :, :4], ROWS[1:2, :, 4:], False),
        (ROWS[..., 4:], ROWS[..., :4], True),
        (ROWS[..., :4], ROWS.clone()[..., 4:], True),
        (ROWS[:2, :, :4], ROWS[1:, :, 4:], True),
        (ROWS[:, :1, :4], ROWS[:, :1, 4:], True),
        (ROWS[..., :4].contiguous(), ROWS[..., 4:].contiguous(), True),
        (ROWS[..., :3], ROWS[..., 3:6], True),
    ],
)
def test_rows_are_key_then_value(key, value, is_moved):
    found = side_by_side(key, value)
    assert torch.equal(found, torch.cat((key, value), dim=-1))
    assert (found.untyped_storage().data_ptr() != key.untyped_storage().data_ptr()) == is_moved
