"""Groups, shared experts and dense layers, read or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from heddle.config.model import MoEConfig
from heddle.errors import ModelFileError, UnsupportedError
from heddle.models.config_fields import Fields
from heddle.models.config_routing import RoutingDefaults, read_routed_experts

EXPERTS = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 5}
GROUPS = {"n_group": 3, "topk_group": 2}


def read(
    defaults: RoutingDefaults | None = None, *, is_sigmoid: bool = True, **settings: Any
) -> MoEConfig | None:
    fields = Fields(Path("config.json"), EXPERTS | settings)
    return read_routed_experts(fields, 4, defaults or RoutingDefaults(), is_sigmoid=is_sigmoid)


def dense_layers(moe: MoEConfig | None) -> list[int]:
    assert moe is not None
    return [layer for layer in range(4) if not moe.has_experts(layer)]


def test_a_model_without_experts_is_dense() -> None:
    assert read(n_routed_experts=None) is None


def test_the_first_layers_are_dense_or_a_list_says_which() -> None:
    assert dense_layers(read(**GROUPS)) == []
    assert dense_layers(read(**GROUPS, first_k_dense_replace=3)) == [0, 1, 2]
    types = ["sparse", "dense", "sparse", "dense"]
    found = read(**GROUPS, mlp_layer_types=types, first_k_dense_replace=3)
    assert dense_layers(found) == [1, 3]


@pytest.mark.parametrize("types", [["dense"] * 3, ["dense", "sparse", "moe", "sparse"]], ids=str)
def test_a_list_of_layers_must_fit(types: list[str]) -> None:
    with pytest.raises(ModelFileError, match=r"mlp_layer_types=.*4 times dense or sparse"):
        read(**GROUPS, mlp_layer_types=types)


def test_absent_settings_are_the_family_s_or_required() -> None:
    family = RoutingDefaults(num_groups=1, num_shared_experts=2, first_dense_layers=1, scaling=1.8)
    moe = read(family)
    assert moe is not None
    assert (moe.num_groups, moe.top_k_groups, moe.num_shared_experts) == (1, 1, 2)
    assert (moe.routed_scaling_factor, dense_layers(moe)) == (1.8, [0])
    stated = read(family, **GROUPS, n_shared_experts=0)
    assert stated is not None
    assert (stated.num_groups, stated.top_k_groups, stated.num_shared_experts) == (3, 2, 0)
    with pytest.raises(ModelFileError, match="n_group is missing; it is required"):
        read()


def test_v2_has_no_groups_unless_it_says_so() -> None:
    plain = read(is_sigmoid=False, **GROUPS)
    assert plain is not None
    assert (plain.scoring, plain.top_k_method, plain.num_groups) == ("softmax", "greedy", 1)
    grouped = read(is_sigmoid=False, **GROUPS, topk_method="group_limited_greedy")
    assert grouped is not None
    assert (grouped.top_k_method, grouped.num_groups) == ("group_limited_greedy", 3)
    with pytest.raises(UnsupportedError, match=r"topk_method='noaux_tc' is not supported; known"):
        read(is_sigmoid=False, **GROUPS, topk_method="noaux_tc")
