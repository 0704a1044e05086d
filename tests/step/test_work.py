"""Estimates of arithmetic follow the shapes, and count pairs of rows and keys exactly."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.config.link_costs import LinkCosts
from heddle.config.model import MoEConfig
from heddle.step.work import LayerWork, row_keys
from tests.support.models import latent_config, model_config

COSTS = LinkCosts(flops=1000.0, memory=10.0)


@given(st.integers(0, 40), st.integers(0, 30), st.integers(0, 30))
def test_each_row_meets_the_cached_keys_the_new_ones_before_it_and_itself(
    cached: int, start: int, count: int
) -> None:
    rows = range(start, start + count)
    assert row_keys(cached, start, start + count) == sum(cached + row + 1 for row in rows)


def test_a_dense_layer_counts_every_weight_once() -> None:
    # Query and output 9 x 64, key and value 3 x 64 each, three matrices of 576 x 1536.
    weights = 576 * (2 * 9 * 64 + 2 * 3 * 64) + 3 * 576 * 1536
    work = LayerWork.of(model_config(), 1, "bfloat16")
    assert (work.row_flops, work.weight_bytes) == (2 * weights, 2 * weights)
    assert work.key_flops == 2 * 9 * (64 + 64)


def test_ranks_share_weights_evenly_and_heads_by_the_fullest_rank() -> None:
    one, four = (LayerWork.of(model_config(), size, "float32") for size in (1, 4))
    assert (four.row_flops * 4, four.weight_bytes * 4) == (one.row_flops, one.weight_bytes)
    assert four.key_flops * 9 == one.key_flops * 3  # 9 heads on 4 ranks: 3 on the fullest


def test_latent_attention_is_met_in_its_per_head_form() -> None:
    assert LayerWork.of(latent_config(), 1, "float32").key_flops == 2 * 16 * (192 + 128)


def test_a_row_of_a_mixture_visits_few_of_its_experts() -> None:
    moe = MoEConfig(
        num_experts=64,
        num_experts_per_token=2,
        num_shared_experts=1,
        expert_intermediate_size=512,
        scoring="softmax",
        normalize_top_k=True,
    )
    mixture = LayerWork.of(model_config(moe=moe), 1, "float32")
    assert mixture == LayerWork.of(model_config(intermediate_size=3 * 512), 1, "float32")


@pytest.mark.parametrize(
    ("num_rows", "seconds"),
    [(0, 0.0), (1, 40.0), (4, 40.0), (10, 100.0)],
    ids=["none", "weights", "equal", "arithmetic"],
)
def test_few_rows_wait_for_the_weights_and_many_for_arithmetic(
    num_rows: int, seconds: float
) -> None:
    work = LayerWork(row_flops=10_000.0, weight_bytes=400.0, key_flops=1.0)
    assert work.dense_seconds(num_rows, COSTS) == seconds
    faster = dataclasses.replace(COSTS, flops=1e9, memory=1e9)
    assert work.dense_seconds(num_rows, faster) < max(seconds, 1e-9)
