"""The formulas against figures worked out by hand; the wire is held against them elsewhere."""

from __future__ import annotations

import pytest

from heddle.step.cost import (
    FREE,
    Cost,
    ExchangeShape,
    context_gather,
    new_kv_gather,
    partials_return,
    query_gather,
)

KB = 1000


def decode(lanes: int, width: int, partial: int, slices: int, partial_bytes: int) -> ExchangeShape:
    """One decode row, pcp 1, 16-bit queries."""
    return ExchangeShape(
        num_replicas=1,
        slice_size=slices,
        num_rows=1,
        lanes=lanes,
        query_width=width,
        partial_width=partial,
        element_bytes=2,
        partial_bytes=partial_bytes,
    )


def test_latent_decode_of_128_heads_over_8_ranks() -> None:
    """A2A moves 359 KB per row and layer with float32 partials, of which queries are 129."""
    shape = decode(lanes=16, width=576, partial=512, slices=8, partial_bytes=4)
    queries = query_gather(shape, copied=True)
    assert queries == Cost(1, 7 * 16 * 576 * 2)
    total = queries + partials_return("a2a", shape, copied=True)
    assert (total.calls, round(total.received_bytes / KB)) == (2, 359)


def test_grouped_decode_of_64_heads_over_2_ranks() -> None:
    shape = decode(lanes=8, width=128, partial=128, slices=2, partial_bytes=4)
    total = query_gather(shape, copied=True) + partials_return("a2a", shape, copied=True)
    assert (total.calls, round(total.received_bytes / KB, 1)) == (2, 6.2)


def test_keys_of_a_long_context_over_8_ranks() -> None:
    """128 query and 8 kv heads of 128, 16 bit, 131,072 tokens: 470 MB when keys move."""
    total = context_gather(8, 131_072 // 8, 8, 256, 2)
    assert (total.calls, round(total.received_bytes / 1e6)) == (1, 470)


@pytest.mark.parametrize("exchange", ["local", "none", "ring"])
def test_an_exchange_without_a_formula_is_not_priced_as_another(exchange: str) -> None:
    shape = decode(lanes=8, width=128, partial=128, slices=2, partial_bytes=4)
    with pytest.raises(ValueError, match=rf"exchange '{exchange}' has no cost in a group of 2"):
        partials_return(exchange, shape, copied=True)


def test_a_group_of_one_and_an_absent_class_cost_nothing() -> None:
    alone = decode(lanes=8, width=64, partial=64, slices=1, partial_bytes=4)
    assert query_gather(alone, copied=True) == FREE
    assert partials_return("local", alone, copied=True) == FREE
    assert new_kv_gather(1, 10, 2, 128, 4) == new_kv_gather(4, 0, 2, 128, 4) == FREE
    assert context_gather(1, 100, 2, 128, 4) == FREE
