"""Rows reach the holders of their experts once, unchanged, and sums come back to their rows."""

from __future__ import annotations

import pytest
import torch

from heddle.comm.base import World
from heddle.comm.threads import ThreadGroup
from heddle.comm.tracing import TracingWorld
from heddle.models.layers.dispatch import Arrivals, Dispatch

ROUTES = [
    [[0, 1], [0, 2], [2, 3]],
    [],
    [[4, 3]],
    [[4, 0], [1, 2], [3, 2], [0, 1], [4, 2]],
]
"""Experts of each row of each rank."""
EXPERTS = 5


def holder(expert: int, ranks: int) -> int:
    """By looking: the rank whose range holds the expert."""
    return next(r for r in range(ranks) if expert in held(r, ranks))


def held(rank: int, ranks: int) -> range:
    return range(EXPERTS * rank // ranks, EXPERTS * (rank + 1) // ranks)


def row_value(rank: int, row: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([10 * rank + row + 1, 0.1, -7.3], dtype=dtype)


def inputs(rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows `[n, 3]`, experts `[n, 2]`, weights `[n, 2]`."""
    count = len(ROUTES[rank])
    rows = [row_value(rank, row, dtype) for row in range(count)]
    wide = torch.promote_types(dtype, torch.float32)
    weights = torch.tensor([[rank + row / 3, 0.7] for row in range(count)], dtype=wide)
    return (
        torch.stack(rows) if rows else torch.empty(0, 3, dtype=dtype),
        torch.tensor(ROUTES[rank], dtype=torch.int64).reshape(-1, 2),
        weights.reshape(-1, 2),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_row_travels_once_to_each_holder_bit_for_bit(ranks: int, dtype: torch.dtype) -> None:
    def body(world: World) -> Arrivals:
        ep = world.group("ep", [range(ranks)])
        rows, experts, weights = inputs(world.global_rank, dtype)
        return Dispatch(ep, experts, EXPERTS).send(rows, weights)

    for rank, arrived in enumerate(ThreadGroup(ranks).run(body)):
        expected = [
            (source, row)
            for source in range(ranks)
            for row, experts in enumerate(ROUTES[source])
            if any(holder(expert, ranks) == rank for expert in experts)
        ]
        assert len(arrived.rows) == len(expected)
        for place, (source, row) in enumerate(expected):
            rows, experts, weights = inputs(source, dtype)
            assert torch.equal(arrived.rows[place], rows[row])
            assert torch.equal(arrived.experts[place], experts[row])
            assert torch.equal(arrived.weights[place], weights[row])


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_come_back_to_their_row_and_add_up_over_holders(ranks: int) -> None:
    """Each holder answers with the sum of the row's own experts, so the total is that of all."""

    def body(world: World) -> torch.Tensor:
        rank = world.global_rank
        ep = world.group("ep", [range(ranks)])
        rows, experts, weights = inputs(rank, torch.float64)
        dispatch = Dispatch(ep, experts, EXPERTS)
        arrived = dispatch.send(rows, weights)
        mine = torch.tensor(held(rank, ranks))
        ids = torch.where(torch.isin(arrived.experts, mine), 10.0**arrived.experts, 0).sum(dim=1)
        return dispatch.collect(ids[:, None] * arrived.rows[:, :1])

    for rank, total in enumerate(ThreadGroup(ranks).run(body)):
        expected = [
            [sum(10.0**expert for expert in experts) * (10 * rank + row + 1)]
            for row, experts in enumerate(ROUTES[rank])
        ]
        assert total.tolist() == expected


def test_sums_are_added_in_order_of_expert_ids() -> None:
    """In float32, 1 + 1e8 - 1e8 is 0 and 1e8 - 1e8 + 1 is 1."""

    def body(world: World) -> float:
        ep = world.group("ep", [range(3)])
        experts = torch.tensor([[2, 0, 1]])
        dispatch = Dispatch(ep, experts, num_experts=3)
        arrived = dispatch.send(torch.ones(1, 1), torch.ones(1, 3))
        value = (1.0, 1e8, -1e8)[world.global_rank]
        return float(dispatch.collect(torch.full((len(arrived.rows), 1), value)))

    assert ThreadGroup(3).run(body) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("routes", "expected"),
    [
        # Rank 0 sends rows 0 and 1 to itself, 1 and 2 to rank 1: m = 2. A row is 3 numbers, then 2
        # ids and 2 weights: 2 ranks x 2 rows x 7 numbers x 4 bytes, half of which arrives.
        ([[[0, 1], [0, 2], [2, 3]], []], [((2,), 16), ((2, 2, 7), 56), ((2, 2, 3), 24)]),
        # Nobody has rows; the calls are made with room for one.
        ([[], []], [((2,), 16), ((2, 1, 7), 28), ((2, 1, 3), 12)]),
    ],
    ids=["some", "none"],
)
def test_bytes_of_a_fixed_routing(
    routes: list[list[list[int]]], expected: list[tuple[tuple[int, ...], int]]
) -> None:
    def body(inner: World) -> list[tuple[tuple[int, ...], float]]:
        world = TracingWorld(inner)
        ep = world.group("ep", [range(2)])
        experts = torch.tensor(routes[world.global_rank], dtype=torch.int64).reshape(-1, 2)
        dispatch = Dispatch(ep, experts, num_experts=4)
        rows = torch.ones(len(experts), 3)
        arrived = dispatch.send(rows, torch.ones(len(experts), 2))
        dispatch.collect(torch.zeros_like(arrived.rows))
        return [(record.shape, record.bytes_received) for record in world.trace.records]

    assert ThreadGroup(2).run(body) == [expected, expected]
