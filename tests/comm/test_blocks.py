from __future__ import annotations

import pytest
import torch

from heddle.comm.blocks import require_blocks, sum_in_order


def test_sums_run_in_order():
    # In float32, (1e8 + 1) - 1e8 is 0 but (1e8 - 1e8) + 1 is 1.
    one, big = torch.tensor([1.0]), torch.tensor([1e8])
    assert sum_in_order([big, one, -big]).item() == 0.0
    assert sum_in_order([big, -big, one]).item() == 1.0


def test_half_sums_are_rounded_once():
    # 256 + 1 is 256 in bfloat16 at every step; together the eight ones count.
    blocks = [torch.tensor([256.0])] + [torch.tensor([1.0])] * 8
    found = sum_in_order([block.bfloat16() for block in blocks])
    assert found.dtype == torch.bfloat16
    assert found.item() == 264.0


def test_integers_stay_exact_and_inputs_unchanged():
    blocks = [torch.tensor([2**62]), torch.tensor([1])]
    assert sum_in_order(blocks).item() == 2**62 + 1
    assert [block.item() for block in blocks] == [2**62, 1]
    alone = sum_in_order(blocks[:1])
    alone += 1
    assert blocks[0].item() == 2**62


@pytest.mark.parametrize("shape", [(), (3, 2), (0,)])
def test_the_leading_axis_counts_ranks(shape):
    require_blocks("all_to_all", torch.zeros(2, 5), 2)
    with pytest.raises(ValueError, match=r"all_to_all got shape .* the group size 2"):
        require_blocks("all_to_all", torch.zeros(shape), 2)
