"""Terms are picked and batched together; a map's width is that of the layout."""

from __future__ import annotations

import pytest
import torch

from heddle.config.model import RecurrentConfig
from heddle.layout.recurrent_heads import RecurrentLayout
from tests.attention.recurrent.test_chunked import HEADS, KEY, VALUE, draw

PARTS = ("query", "key", "value", "log_decay", "beta")


def test_every_part_is_picked() -> None:
    terms, _, _ = draw(0, 6, True)
    index = torch.tensor([[4, 0], [5, 1]])
    picked = terms.pick(index)
    assert picked.num_tokens == 2
    assert torch.equal(picked.tokens(1, 2).key[:, 0], terms.key[[0, 1]])
    for part in PARTS:
        assert torch.equal(getattr(picked, part), getattr(terms, part)[index])
        assert torch.equal(getattr(terms.batched(), part)[0], getattr(terms, part))
        assert getattr(terms.to(torch.float32), part).dtype == torch.float32


@pytest.mark.parametrize(("method", "is_delta"), [("gated_delta", True), ("mamba2", False)])
def test_the_map_is_as_wide_as_the_layout_says(method: str, is_delta: bool) -> None:
    terms, _, _ = draw(0, 3, is_delta)
    config = RecurrentConfig(
        method=method,  # type: ignore[arg-type]
        num_heads=HEADS,
        num_key_heads=HEADS,
        key_dim=KEY,
        value_dim=VALUE,
        norm_groups=HEADS,
    )
    assert terms.map_width == RecurrentLayout(config, 1).map_width
