"""The attention of a step equals dense attention over the full visible key set.

Random steps on thread ranks: any legal axes, any mix of row classes, with and without cached
context.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.layout.rows import RowClass, RowRequest
from heddle.step.placement import Placed
from heddle.step.topology import Topology
from tests.support.attention_bench import (
    SINKS,
    call_gqa,
    call_gqa_with_sinks,
    gqa_truth,
    in_float64,
    make_mla_call,
    mla_case,
    mla_truth,
    worst_error,
)
from tests.support.batches import make_batch, make_topology, request_lengths, topologies


@settings(max_examples=120)
@given(topologies(), request_lengths)
def test_gqa_equals_dense(topology: Topology, lengths: list[tuple[int, int]]) -> None:
    topology = dataclasses.replace(topology, dtype="float64", kv_cache_dtype="float64")
    batch = make_batch(topology, lengths)
    truth = gqa_truth(topology, batch, torch.float64)
    assert worst_error(topology, batch, truth, call_gqa, "reference") <= 1e-12


@settings(max_examples=60)
@given(topologies(), request_lengths, st.randoms(use_true_random=False))
def test_any_mix_of_row_classes_equals_dense(
    topology: Topology, lengths: list[tuple[int, int]], random: object
) -> None:
    """Forced classes: a decode row may be split, a long prompt copied or whole on one rank."""
    choices = [
        RowRequest(new, random.choice(list(RowClass)), random.randrange(topology.mesh.pcp_size))  # type: ignore[attr-defined]
        for _, new in lengths
    ]
    topology = dataclasses.replace(
        topology,
        dtype="float64",
        kv_cache_dtype="float64",
        row_policy=lambda requests, topology: Placed(tuple(choices), ()),
    )
    batch = make_batch(topology, lengths)
    truth = gqa_truth(topology, batch, torch.float64)
    assert worst_error(topology, batch, truth, call_gqa, "reference") <= 1e-12


@settings(max_examples=60)
@given(topologies(), request_lengths, st.sampled_from([0.0, 3.0]), st.sampled_from([None, 0.2]))
def test_sinks_and_soft_caps_equal_dense(
    topology: Topology, lengths: list[tuple[int, int]], softcap: float, scale: float | None
) -> None:
    """A sink counts once, however many ranks share the keys; a cap comes before the softmax."""
    model = dataclasses.replace(
        topology.model, attention_softcap=softcap, attention_scale=scale, has_sinks=True
    )
    topology = dataclasses.replace(topology, model=model, dtype="float64", kv_cache_dtype="float64")
    batch = make_batch(topology, lengths)
    truth = gqa_truth(topology, batch, torch.float64, SINKS)
    assert worst_error(topology, batch, truth, call_gqa_with_sinks, "reference") <= 1e-12


@settings(max_examples=40)
@given(topologies(), request_lengths)
def test_the_fast_backend_stays_within_float32_rounding(
    topology: Topology, lengths: list[tuple[int, int]]
) -> None:
    """At most twice the error of a plain softmax in float32, and one rounding step."""
    batch = make_batch(topology, lengths)
    plain = gqa_truth(topology, batch, torch.float32)
    exact = in_float64(topology, plain)
    expected = torch.cat(exact.expected)
    bound = 2 * float((torch.cat(plain.expected) - expected).abs().max())
    bound += torch.finfo(torch.float32).eps * float(expected.abs().max())
    assert worst_error(topology, batch, exact, call_gqa, "torch") <= bound


@settings(max_examples=80)
@given(topologies(), request_lengths)
def test_mla_equals_dense_in_both_forms(topology: Topology, lengths: list[tuple[int, int]]) -> None:
    """Copied rows and travelling queries run absorbed, the rest per head."""
    topology, ups = mla_case(topology)
    batch = make_batch(topology, lengths)
    truth = mla_truth(topology, batch, ups)
    assert worst_error(topology, batch, truth, make_mla_call(ups), "reference") <= 1e-11


@pytest.mark.parametrize("length", [0, 1, 2, 3, 5, 8])
def test_an_empty_rank_joins_and_changes_nothing(length: int) -> None:
    """Fewer cached tokens than ranks: some shards are empty, and their NaN must not travel."""
    topology = dataclasses.replace(
        make_topology((1, 4, 4), interleave=2, context_exchange="gather_q"),
        dtype="float64",
        kv_cache_dtype="float64",
    )
    batch = make_batch(topology, [(length, 9), (length, 1)])
    truth = gqa_truth(topology, batch, torch.float64)
    assert worst_error(topology, batch, truth, call_gqa, "reference") <= 1e-12
