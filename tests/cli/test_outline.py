"""A model's parts over a layout: every layer in one stage and one group, every expert on one rank
of a group."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from heddle.cli.outline import cache_group, experts, outline, recurrent, stages
from heddle.config.model import LayerKind, MoEConfig, RecurrentConfig
from heddle.config.visibility import Visibility
from heddle.layout.mesh import Mesh
from tests.support.batches import make_topology


def moe(num_experts):
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_token=1,
        expert_intermediate_size=8,
        scoring="softmax",
        normalize_top_k=False,
    )


def over(mesh, **fields):
    topology = make_topology((mesh.tp_size, mesh.pcp_size, mesh.dcp_size), **fields)
    return dataclasses.replace(topology, mesh=mesh)


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 3))
def test_stages_share_out_all_layers_and_all_ranks(num_stages, extra_layers, dp):
    mesh = Mesh(tp_size=2, pp_size=num_stages, dp_size=dp)
    topology = over(mesh, num_layers=num_stages + extra_layers)
    found = stages(topology, is_known=True)
    layers = [layer for row in found for layer in range(*row["layers"])]
    assert layers == list(range(num_stages + extra_layers))
    assert sorted(rank for row in found for rank in row["ranks"]) == list(
        range(2 * num_stages * dp)
    )
    assert found[-1]["ranks"][-1] == mesh.world_size - 1


@given(st.integers(1, 20), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))
def test_each_expert_is_on_one_rank_of_each_stage(num_experts, tp, dp, pp):
    mesh = Mesh(tp_size=tp, dp_size=dp, pp_size=pp)
    topology = dataclasses.replace(
        over(mesh, moe=moe(num_experts), num_layers=2), has_expert_parallel=True
    )
    found = experts(topology)
    assert found["num_experts"] == num_experts
    held = [e for row in found["per_rank"] for e in range(*row["experts"])]
    assert sorted(held) == sorted(list(range(num_experts)) * pp)
    sizes = [row["experts"][1] - row["experts"][0] for row in found["per_rank"]]
    assert max(sizes) - min(sizes) <= 1


def test_experts_are_told_only_where_they_are_dealt_out():
    assert experts(make_topology((2, 1, 1), moe=moe(4))) is None


def test_a_narrow_cache_shows_in_the_bytes_of_a_token():
    topology = dataclasses.replace(make_topology((2, 1, 1), num_layers=3), kv_cache_dtype="int8")
    (group,) = topology.groups
    assert cache_group(topology, group)["token_bytes"] == 3 * 2 * (2 * 8 + 2 * 4)


def test_groups_say_what_a_row_sees_and_how_many_ranks_share_it():
    kinds = (LayerKind(), LayerKind(visibility=Visibility("window", 5, num_first=2)))
    topology = make_topology((1, 2, 2), block_size=4, layer_kinds=kinds * 2, num_layers=4)
    full, window = (cache_group(topology, group) for group in topology.groups)
    assert full == {
        "rule": "full",
        "window": None,
        "first_tokens": 0,
        "layers": [0, 2],
        "ranks_sharing": 2,
        "block_tokens": 8,
        "token_bytes": 2 * 4 * 2 * 8 * 4,  # layers, kv heads, key and value of 8, float32
    }
    assert window == {
        "rule": "window",
        "window": 5,
        "first_tokens": 2,
        "layers": [1, 3],
        "ranks_sharing": 1,  # fewer than two virtual blocks: whole on every rank
        "block_tokens": 4,
        "token_bytes": 2 * 4 * 2 * 8 * 4,
    }


def test_recurrent_layers_are_listed_with_their_slots():
    assert recurrent(make_topology((1, 1, 1))) is None
    config = RecurrentConfig(
        method="lightning", num_heads=4, num_key_heads=4, key_dim=4, value_dim=4, norm_groups=1
    )
    kinds = (LayerKind(mixer="recurrent"), LayerKind(), LayerKind(mixer="recurrent"))
    topology = make_topology((1, 1, 1), layer_kinds=kinds, num_layers=3, recurrent=config)
    assert recurrent(topology) == {"layers": [0, 2], "state_slots_per_sequence": 1}


def test_of_an_assumed_model_nothing_is_said_about_layers():
    found = outline(over(Mesh(pp_size=2)), is_known=False)
    assert [row["layers"] for row in found["stages"]] == [None, None]
    assert (found["cache_groups"], found["recurrent"], found["experts"]) == (None, None, None)
