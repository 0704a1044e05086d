"""Cached context gives the same result however it travels and however it is cut."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from heddle.config import MLAConfig
from heddle.step.plan import plan
from tests.support.attention_bench import call_gqa, gqa_truth, worst_error
from tests.support.batches import make_batch, make_topology

LATENT = MLAConfig(
    q_lora_rank=None, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5
)
AROUND_A_WORKSPACE = [(23, 5), (24, 5), (25, 5), (49, 5)]


@pytest.mark.parametrize("workspace", [2, 3, 23, 24, 25, 48, 400])
def test_no_cliff_at_any_workspace(workspace: int) -> None:
    topology = dataclasses.replace(
        make_topology((1, 2, 2), workspace=workspace), dtype="float64", kv_cache_dtype="float64"
    )
    batch = make_batch(topology, AROUND_A_WORKSPACE)
    truth = gqa_truth(topology, batch, torch.float64)
    assert worst_error(topology, batch, truth, call_gqa, "reference") <= 1e-12
    chunks = plan(batch, topology).context_chunks
    assert (len(chunks) > 1) == (workspace < 4 * 49)


@pytest.mark.parametrize("merge", ["ag_rs", "ag_ar", "a2a"])
@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 2, 4), (4, 2, 2), (1, 4, 2)], ids=str)
def test_travelling_queries_equal_travelling_keys(sizes: tuple[int, int, int], merge: str) -> None:
    topology = dataclasses.replace(
        make_topology(sizes, context_exchange="gather_q", merge_exchange=merge),
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
    assert len(plan(batch, gqa).context_chunks) == 1
    mla = dataclasses.replace(gqa, model=dataclasses.replace(gqa.model, mla=LATENT))
    assert [chunk.padded_local_rows for chunk in plan(batch, mla).context_chunks] == [16, 16, 16, 2]
