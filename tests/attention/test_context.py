"""Cached context gives the same result however it travels and however it is cut."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from heddle.config import MLAConfig
from heddle.layout.rows import RowClass, RowRequest
from heddle.step.placement import Placed
from heddle.step.plan import plan
from heddle.step.topology import Topology
from tests.support.attention_bench import call_gqa, gqa_truth, run_ranks, worst_error
from tests.support.batches import by_length, make_batch, make_topology, whole_in_turn

LATENT = MLAConfig(
    q_lora_rank=None, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5
)
AROUND_A_WORKSPACE = [(23, 5), (24, 5), (25, 5), (49, 5)]


@pytest.mark.parametrize("workspace", [2, 3, 23, 24, 25, 48, 400])
def test_no_cliff_at_any_workspace(workspace: int) -> None:
    topology = dataclasses.replace(
        make_topology((1, 2, 2), workspace=workspace, row_policy=by_length),
        dtype="float64",
        kv_cache_dtype="float64",
    )
    batch = make_batch(topology, AROUND_A_WORKSPACE)
    truth = gqa_truth(topology, batch, torch.float64)
    assert worst_error(topology, batch, truth, call_gqa, "reference") <= 1e-12
    chunks = plan(batch, topology).groups[0].classes[RowClass.SPLIT].chunks
    assert (len(chunks) > 1) == (workspace < 4 * 49)


@pytest.mark.parametrize("merge", ["ag_rs", "ag_ar", "a2a", "a2a_fine"])
@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 2, 4), (4, 2, 2), (1, 4, 2)], ids=str)
def test_travelling_queries_equal_travelling_keys(sizes: tuple[int, int, int], merge: str) -> None:
    topology = dataclasses.replace(
        make_topology(sizes, context_exchange="gather_q", return_exchange=merge),
        dtype="float64",
        kv_cache_dtype="float64",
    )
    lengths = [(0, 9), (1, 8), (3, 17), (40, 8)]
    batch = make_batch(topology, lengths)
    truth = gqa_truth(topology, batch, torch.float64)
    assert worst_error(topology, batch, truth, call_gqa, "reference") <= 1e-12


def test_latents_expanded_on_one_rank_stay_within_the_workspace() -> None:
    """One rank reads keys in place, but a latent context is expanded, so it is cut too."""
    gqa = make_topology((1, 1, 1), workspace=16)
    batch = make_batch(gqa, [(50, 4)])

    def sizes(topology: Topology) -> list[int]:
        chunks = plan(batch, topology).groups[0].classes[RowClass.SPLIT].chunks
        return [chunk.padded_local_rows for chunk in chunks]

    assert sizes(gqa) == [50]
    mla = dataclasses.replace(gqa, model=dataclasses.replace(gqa.model, mla=LATENT))
    assert sizes(mla) == [16, 16, 16, 2]


@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 1, 2), (2, 2, 4), (4, 2, 2), (1, 4, 2)], ids=str)
def test_passed_queries_give_the_bits_of_gathered_ones(sizes: tuple[int, int, int]) -> None:
    """Blocks meet the same keys and merge in the same order."""

    def outputs(context: str) -> list[torch.Tensor]:
        topology = make_topology(
            sizes,
            interleave=2,
            context_exchange=context,
            return_exchange="a2a",
            row_policy=whole_in_turn,
        )
        batch = make_batch(topology, [(37, 9), (21, 8), (0, 12), (3, 9), (2, 11)])
        truth = gqa_truth(topology, batch, torch.float32)
        return [r.out for r in run_ranks(topology, batch, truth, call_gqa, "reference")]

    for found, expected in zip(outputs("pass_q"), outputs("gather_q"), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("context", ["gather_q", "pass_q", "gather_kv", "ring_kv"])
def test_a_group_whose_rows_have_no_context_joins_its_exchange(context: str) -> None:
    """DCP 2 in PCP 4: the row with context lives in one group, and both do the same."""
    placed = [RowRequest(3, RowClass.WHOLE, owner=0), RowRequest(2, RowClass.WHOLE, owner=2)]
    topology = dataclasses.replace(
        make_topology((1, 4, 2), context_exchange=context, return_exchange="a2a"),
        dtype="float64",
        kv_cache_dtype="float64",
        row_policy=lambda requests, topology: Placed(tuple(placed), ()),
    )
    batch = make_batch(topology, [(9, 3), (0, 2)])
    truth = gqa_truth(topology, batch, torch.float64)
    assert worst_error(topology, batch, truth, call_gqa, "reference") <= 1e-12
