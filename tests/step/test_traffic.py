"""Prices against figures worked out by hand; the wire is held against them elsewhere."""

from __future__ import annotations

import pytest

from heddle.config.link_costs import LinkCosts
from heddle.layout.mesh import Mesh
from heddle.step.exchanges import ExchangeSizes, partials_return, query_gather
from heddle.step.traffic import FREE, Collective, Cost, cost_of

KB = 1000


def decode_cost(
    sizes: tuple[int, int], returns: str, *, lanes: int, width: int, partial: int
) -> Cost:
    """One decode row on (tp, dcp) ranks, pcp 1, 16-bit queries."""
    mesh = Mesh(tp_size=sizes[0], dcp_size=sizes[1])
    shape = ExchangeSizes(
        world_size=mesh.dcp_size,
        pcp_size=1,
        num_replicas=1,
        slice_size=mesh.slice_size,
        lanes=lanes,
        query_width=width,
        partial_width=partial,
        stored_heads=1,
        row_width=width,
        dtype="bfloat16",
        row_dtype="bfloat16",
    )
    calls = [
        *query_gather(1, shape, is_copy=True),
        *partials_return(returns, 1, shape, is_copy=True),
    ]
    return cost_of(calls, mesh)


@pytest.mark.parametrize(("returns", "kb", "calls"), [("a2a", 359, 2), ("ag_rs", 362, 3)])
def test_latent_decode_of_128_heads_over_8_ranks(returns: str, kb: int, calls: int) -> None:
    """Float32 partials; queries are 129 KB of it."""
    total = decode_cost((8, 8), returns, lanes=16, width=576, partial=512)
    assert (total.calls, round(total.received_bytes / KB)) == (calls, kb)


def test_grouped_decode_of_64_heads_over_2_ranks() -> None:
    total = decode_cost((8, 2), "a2a", lanes=8, width=128, partial=128)
    assert (total.calls, round(total.received_bytes / KB, 1)) == (2, 6.2)


def test_keys_of_a_long_context_over_8_ranks() -> None:
    """128 query and 8 kv heads of 128, 16 bit, 131,072 tokens: 470 MB when keys move."""
    mesh = Mesh(pcp_size=8, dcp_size=8)
    call = Collective("all_gather", "dcp", (131_072 // 8, 8, 256), "bfloat16")
    total = cost_of([call], mesh)
    assert (total.calls, round(total.received_bytes / 1e6)) == (1, 470)


@pytest.mark.parametrize(
    ("op", "received"),
    [
        ("all_gather", 3 * 96),
        ("reduce_scatter", 72),
        ("all_to_all", 72),
        ("all_reduce", 144),
        ("shift", 96),
        ("receive", 96),
        ("send", 0),
    ],
)
def test_what_a_call_brings_in_a_group_of_four(op: str, received: int) -> None:
    mesh = Mesh(pcp_size=4, dcp_size=4)
    assert cost_of([Collective(op, "dcp", (4, 6), "float32")], mesh) == Cost(1, received)


def test_a_size_that_only_the_data_know_has_no_price() -> None:
    with pytest.raises(ValueError, match="has no fixed cost"):
        cost_of([Collective("all_to_all", "ep", (2, None, 8), "float32")], Mesh(tp_size=2))


def test_an_unknown_way_back_is_not_priced_as_another() -> None:
    with pytest.raises(ValueError, match="returns='ring' has no calls"):
        decode_cost((2, 2), "ring", lanes=8, width=64, partial=64)


def test_seconds_are_calls_and_bytes() -> None:
    costs = LinkCosts(alpha=1e-3, beta=1e6)
    assert Cost(3, 2_000_000).seconds(costs) == pytest.approx(2.003)
    assert FREE.seconds(costs) == 0
