"""Shapes and constants of MiniMax-M2: full attention in every layer, a partial rotary, experts."""

from __future__ import annotations

from dataclasses import replace

from heddle.config.model import ModelConfig, MoEConfig
from heddle.models.config_common import read_base, require_silu
from heddle.models.config_experts import read_expert_counts
from heddle.models.config_fields import Fields
from heddle.models.config_rope import read_rope, read_rotary_dim

_THETA = 5e6
_ONLY = {"scoring_func": "sigmoid", "qk_norm_type": "per_layer"}


def read_minimax_m2_config(fields: Fields, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """Read a MiniMax-M2 model.

    Raises:
        ModelFileError: a value is missing or malformed.
        UnsupportedError: a setting is not built here.
    """
    require_silu(fields)
    _refuse_others(fields)
    rope = read_rope(fields, interleaved=False, default_theta=_THETA, is_partial=True)
    base = read_base(fields, architecture, eos, rope)
    num_experts, per_token = read_expert_counts(fields, "num_local_experts")
    return replace(
        base,
        rotary_dim=_read_rotary_dim(fields, base.head_dim),
        qk_width_norm=True,
        moe=MoEConfig(
            num_experts=num_experts,
            num_experts_per_token=per_token,
            expert_intermediate_size=base.intermediate_size,
            scoring="sigmoid",
            normalize_top_k=True,
            top_k_method="noaux_tc",
        ),
    )


def _refuse_others(fields: Fields) -> None:
    """Settings of the published files that the reference does not read: they must be its own."""
    for key, value in _ONLY.items():
        if fields.text(key, value) != value:
            raise fields.unsupported(key, f"known: {value}")
    for key in ("use_qk_norm", "use_routing_bias"):
        if not fields.boolean(key, True):
            raise fields.unsupported(key, "every published model has it (true)")
    if fields.integer("shared_intermediate_size", 0, minimum=0):
        raise fields.unsupported("shared_intermediate_size", "there is no shared expert (0)")
    if set(fields.integers("attn_type_list")) - {1}:
        raise fields.unsupported("attn_type_list", "every layer has full attention (1)")


def _read_rotary_dim(fields: Fields, head_dim: int) -> int:
    """Elements that turn: stated as a number, or as a share of the head."""
    width = fields.optional_integer("rotary_dim", minimum=2)
    if width is None:
        return read_rotary_dim(fields, head_dim, 1.0)
    if width > head_dim or width % 2:
        raise fields.wrong("rotary_dim", f"an even number up to head_dim={head_dim} was expected")
    return width
