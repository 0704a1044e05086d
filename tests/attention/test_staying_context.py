"""Keys that come to their rows are merged in one order, however they came."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from heddle.config.visibility import FULL, Visibility
from tests.support.attention_bench import call_gqa, gqa_truth, run_ranks, worst_error
from tests.support.batches import make_batch, make_topology, whole_in_turn

LENGTHS = [(37, 9), (21, 8), (0, 12), (3, 9), (2, 11)]
CUT = [(1, 2, 2), (2, 1, 2), (1, 4, 4), (2, 2, 4), (1, 4, 2)]


def outputs(sizes: tuple[int, int, int], **fields: Any) -> list[torch.Tensor]:
    topology = make_topology(
        sizes, interleave=2, row_policy=whole_in_turn, return_exchange="a2a", **fields
    )
    batch = make_batch(topology, LENGTHS)
    truth = gqa_truth(topology, batch, torch.float32)
    return [r.out for r in run_ranks(topology, batch, truth, call_gqa, "reference")]


@pytest.mark.parametrize("rule", [FULL, Visibility("window", 20, num_first=5)], ids=str)
@pytest.mark.parametrize("sizes", CUT, ids=str)
def test_shards_of_a_ring_merge_in_ascending_order_of_rank(
    sizes: tuple[int, int, int], rule: Visibility
) -> None:
    """A lane per rank is what a rank stores: gathered at once, and merged lane by lane."""
    ring = outputs(sizes, context_exchange="ring_kv", rule=rule, block_size=2)
    gathered = outputs(sizes, workspace=400, lanes=sizes[2], rule=rule, block_size=2)
    assert ring
    for found, expected in zip(ring, gathered, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("sizes", CUT, ids=str)
def test_shards_that_hold_nothing_take_part(sizes: tuple[int, int, int]) -> None:
    """Three cached tokens in runs of two: some ranks send pads alone."""
    topology = dataclasses.replace(
        make_topology(sizes, interleave=2, context_exchange="ring_kv"),
        dtype="float64",
        kv_cache_dtype="float64",
    )
    batch = make_batch(topology, [(3, 9), (0, 12)])
    truth = gqa_truth(topology, batch, torch.float64)
    assert worst_error(topology, batch, truth, call_gqa, "reference") <= 1e-12
