"""Canonical lanes: the bits of attention do not depend on how many ranks share the keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from heddle.config.visibility import FULL, Visibility
from heddle.step.topology import Topology
from tests.support.attention_bench import (
    call_gqa,
    call_gqa_with_sinks,
    gqa_truth,
    make_mla_call,
    mla_case,
    mla_truth,
    run_ranks,
)
from tests.support.batches import make_batch, make_topology, whole_in_turn

LENGTHS = [(37, 9), (21, 8), (50, 1), (0, 12), (3, 5), (18, 2)]
"""Cached and new tokens; the classes take turns."""


def topology_of(sizes: tuple[int, int, int], lanes: int | None, **fields: Any) -> Topology:
    return make_topology(
        sizes,
        interleave=2,
        workspace=20,
        return_exchange="auto",
        context_exchange=fields.pop("context", "gather_kv"),
        lanes=lanes,
        row_policy=whole_in_turn,
        **fields,
    )


def outputs(topology: Topology, call: Any = call_gqa) -> list[torch.Tensor]:
    batch = make_batch(topology, LENGTHS)
    truth = gqa_truth(topology, batch, torch.float32)
    results = run_ranks(topology, batch, truth, call, "reference")
    assert max(result.error for result in results) < 1e-4
    assert all(result.out.numel() for result in results)
    return [result.out for result in results]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("context", ["gather_kv", "gather_q"])
@pytest.mark.parametrize("lanes", [4, 12])
@pytest.mark.parametrize("plane", [(4, 1), (1, 4)], ids=str)
def test_every_dcp_gives_equal_bits(plane: tuple[int, int], lanes: int, context: str) -> None:
    alone = outputs(topology_of((*plane, 1), lanes))
    for dcp in (2, 4):
        assert equal(outputs(topology_of((*plane, dcp), lanes, context=context)), alone)


def test_without_lanes_the_bits_differ() -> None:
    """Else the law above would say nothing."""
    assert not equal(outputs(topology_of((4, 1, 4), None)), outputs(topology_of((4, 1, 1), None)))


@pytest.mark.parametrize(
    "rule",
    [FULL, Visibility("window", 20), Visibility("window", 6, num_first=3), Visibility("chunk", 40)],
    ids=str,
)
def test_windows_and_sinks_keep_their_bits(rule: Visibility) -> None:
    def run(dcp: int) -> list[torch.Tensor]:
        topology = topology_of((1, 4, dcp), 4, rule=rule, has_sinks=True, block_size=2)
        batch = make_batch(topology, LENGTHS)
        truth = gqa_truth(topology, batch, torch.float32)
        results = run_ranks(topology, batch, truth, call_gqa_with_sinks, "reference")
        return [result.out for result in results]

    alone = run(1)
    assert equal(run(2), alone)
    assert equal(run(4), alone)


def test_latent_attention_keeps_its_bits() -> None:
    def run(dcp: int) -> list[torch.Tensor]:
        topology, ups = mla_case(topology_of((4, 1, dcp), 4))
        batch = make_batch(topology, LENGTHS)
        truth = mla_truth(topology, batch, ups)
        results = run_ranks(topology, batch, truth, make_mla_call(ups), "reference")
        assert max(result.error for result in results) <= 1e-11
        return [result.out for result in results]

    alone = run(1)
    assert equal(run(2), alone)
    assert equal(run(4), alone)
