"""Settings of a mixture as DeepSeek writes them, and GLM after it: groups of experts, shared ones.

"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8,
"topk_group": 4, "first_k_dense_replace": 3, "scoring_func": "sigmoid", ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from heddle.config.model import MoEConfig
from heddle.models.config_experts import read_expert_counts
from heddle.models.config_fields import Fields

Method = Literal["greedy", "group_limited_greedy", "noaux_tc"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingDefaults:
    """What a family means by an absent setting."""

    num_groups: int | None = None
    """None: the setting is required."""
    num_shared_experts: int = 0
    first_dense_layers: int = 0
    scaling: float = 1.0


def read_routed_experts(
    fields: Fields, num_layers: int, defaults: RoutingDefaults, *, is_sigmoid: bool
) -> MoEConfig | None:
    """The mixture of a model; None: every layer is dense.

    Args:
        fields: the top level of `config.json`.
        num_layers: of the model.
        defaults: of the family.
        is_sigmoid: scored and corrected as in V3 and after it; else as in V2.

    Raises:
        ModelFileError: a value is missing or malformed.
        UnsupportedError: a setting is not built here.
    """
    if "n_routed_experts" not in fields:
        return None
    num_experts, per_token = read_expert_counts(fields, "n_routed_experts")
    if fields.integer("moe_layer_freq", 1) != 1:
        raise fields.unsupported(
            "moe_layer_freq", "every layer above the dense ones must be MoE (1)"
        )
    method = _read_method(fields, is_sigmoid=is_sigmoid)
    num_groups, top_k_groups = 1, 1
    if method != "greedy":
        num_groups, top_k_groups = _read_groups(fields, num_experts, per_token, defaults.num_groups)
    first_dense, dense = _read_dense_layers(fields, num_layers, defaults.first_dense_layers)
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_token=per_token,
        num_shared_experts=fields.integer(
            "n_shared_experts", defaults.num_shared_experts, minimum=0
        ),
        expert_intermediate_size=fields.integer("moe_intermediate_size"),
        first_dense_layers=first_dense,
        dense_layers=dense,
        scoring="sigmoid" if is_sigmoid else "softmax",
        normalize_top_k=_read_normalize(fields, is_sigmoid=is_sigmoid),
        routed_scaling_factor=fields.number("routed_scaling_factor", defaults.scaling),
        num_groups=num_groups,
        top_k_groups=top_k_groups,
        top_k_method=method,
    )


def _read_method(fields: Fields, *, is_sigmoid: bool) -> Method:
    scoring = "sigmoid" if is_sigmoid else "softmax"
    if fields.text("scoring_func", scoring) != scoring:
        raise fields.unsupported("scoring_func", "V3 scores by sigmoid, V2 by softmax")
    legal: tuple[Method, ...] = ("noaux_tc",) if is_sigmoid else ("greedy", "group_limited_greedy")
    asked = fields.text("topk_method", legal[0])
    for method in legal:
        if method == asked:
            return method
    raise fields.unsupported("topk_method", f"known for this architecture: {', '.join(legal)}")


def _read_normalize(fields: Fields, *, is_sigmoid: bool) -> bool:
    normalize = fields.boolean("norm_topk_prob", is_sigmoid)
    if normalize and not is_sigmoid:
        # Public implementations disagree on whether scaling then still applies.
        raise fields.unsupported("norm_topk_prob", "V2 weights are not normalised (false)")
    return normalize


def _read_groups(
    fields: Fields, num_experts: int, per_token: int, default: int | None
) -> tuple[int, int]:
    """Groups of experts, and how many of them a row chooses from."""
    num_groups = fields.integer("n_group", default)
    top_k_groups = fields.integer("topk_group", default)
    if num_experts % num_groups:
        raise fields.wrong("n_group", f"it must divide n_routed_experts={num_experts}")
    if top_k_groups > num_groups:
        raise fields.wrong("topk_group", f"at most n_group={num_groups}")
    room = top_k_groups * (num_experts // num_groups)
    if per_token > room:
        raise fields.wrong("num_experts_per_tok", f"the chosen groups hold {room} experts")
    return num_groups, top_k_groups


def _read_dense_layers(
    fields: Fields, num_layers: int, default: int
) -> tuple[int, tuple[int, ...]]:
    """How many leading layers are dense, or where a list says so which; a list comes first."""
    if "mlp_layer_types" not in fields:
        return fields.integer("first_k_dense_replace", default, minimum=0), ()
    types = fields.strings("mlp_layer_types")
    if len(types) != num_layers or set(types) - {"dense", "sparse"}:
        raise fields.wrong("mlp_layer_types", f"{num_layers} times dense or sparse was expected")
    return 0, tuple(layer for layer, type_ in enumerate(types) if type_ == "dense")
