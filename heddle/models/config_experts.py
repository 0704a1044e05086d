"""Shapes and constants of mixtures with grouped queries: Mixtral, Qwen2 and Qwen3, OLMoE."""

from __future__ import annotations

from dataclasses import replace

from heddle.config.model import LayerKind, ModelConfig, MoEConfig
from heddle.models.config_common import read_base, require_silu
from heddle.models.config_fields import MAX_EXPERTS, Fields
from heddle.models.config_layers import FULL, SLIDING, read_window_kinds, uniform_window
from heddle.models.config_rope import read_rope

_MIXTRAL_THETA = 1e6
_QWEN2_WINDOW_LAYERS = 28


def read_mixtral_config(fields: Fields, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """Read a Mixtral model: every layer is a mixture.

    Raises:
        ModelFileError: a value is missing or malformed.
        UnsupportedError: a setting is not built here.
    """
    require_silu(fields)
    rope = read_rope(fields, interleaved=False, default_theta=_MIXTRAL_THETA)
    base = read_base(fields, architecture, eos, rope)
    window = fields.optional_integer("sliding_window")
    return replace(
        base,
        moe=read_mixtral_moe(fields, base.intermediate_size),
        layer_kinds=uniform_window(base.num_layers, window),
    )


def read_mixtral_moe(fields: Fields, inner_size: int) -> MoEConfig:
    """The mixture of a Mixtral model: in every layer, without shared experts.

    Args:
        fields: the top level of `config.json`.
        inner_size: of an expert.

    Raises:
        ModelFileError: a value is missing or malformed.
    """
    num_experts, per_token = read_expert_counts(fields, "num_local_experts")
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_token=per_token,
        expert_intermediate_size=inner_size,
        scoring="softmax",
        normalize_top_k=True,
    )


def read_qwen_moe_config(fields: Fields, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """Read a Qwen2 or Qwen3 mixture: some layers may be dense.

    Raises:
        ModelFileError: a value is missing or malformed.
        UnsupportedError: a setting is not built here.
    """
    require_silu(fields)
    qwen3 = architecture == "Qwen3MoeForCausalLM"
    base = read_base(fields, architecture, eos, read_rope(fields, interleaved=False))
    attention_bias = qwen3 and fields.boolean("attention_bias", False)
    return replace(
        base,
        qk_norm=qwen3,
        qkv_bias=attention_bias if qwen3 else fields.boolean("qkv_bias", True),
        output_bias=attention_bias,
        layer_kinds=_qwen_kinds(fields, qwen3, base.num_layers),
        moe=read_qwen_moe(fields, base.num_layers, has_shared=not qwen3),
    )


def read_qwen_moe(fields: Fields, num_layers: int, *, has_shared: bool) -> MoEConfig:
    """The mixture of a Qwen model.

    Args:
        fields: the top level of `config.json`.
        num_layers: of the model.
        has_shared: every row visits a shared expert, too, behind a gate.

    Raises:
        ModelFileError: a value is missing or malformed.
    """
    key = "num_experts" if "num_experts" in fields else "num_local_experts"
    num_experts, per_token = read_expert_counts(fields, key)
    step = fields.integer("decoder_sparse_step", 1)
    listed = fields.integers("mlp_only_layers")
    dense = [layer for layer in range(num_layers) if layer in listed or (layer + 1) % step]
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_token=per_token,
        expert_intermediate_size=fields.integer("moe_intermediate_size"),
        shared_intermediate_size=(
            fields.integer("shared_expert_intermediate_size") if has_shared else None
        ),
        has_shared_gate=has_shared,
        dense_layers=tuple(dense),
        scoring="softmax",
        normalize_top_k=fields.boolean("norm_topk_prob", False),
    )


def read_olmoe_config(fields: Fields, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """Read an OLMoE model: every layer is a mixture, queries and keys are normed as in OLMo-2.

    Raises:
        ModelFileError: a value is missing or malformed.
        UnsupportedError: a setting is not built here.
    """
    require_silu(fields)
    if "clip_qkv" in fields:
        raise fields.unsupported("clip_qkv", "queries, keys and values are not clipped (null)")
    base = read_base(fields, architecture, eos, read_rope(fields, interleaved=False))
    num_experts, per_token = read_expert_counts(fields, "num_experts")
    attention_bias = fields.boolean("attention_bias", False)
    return replace(
        base,
        qk_width_norm=True,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        moe=MoEConfig(
            num_experts=num_experts,
            num_experts_per_token=per_token,
            expert_intermediate_size=base.intermediate_size,
            scoring="softmax",
            normalize_top_k=fields.boolean("norm_topk_prob", False),
        ),
    )


def read_expert_counts(fields: Fields, key: str) -> tuple[int, int]:
    """Experts of a layer, and how many of them a row visits.

    Raises:
        ModelFileError: a row would visit more experts than there are.
    """
    num_experts = fields.integer(key, maximum=MAX_EXPERTS)
    per_token = fields.integer("num_experts_per_tok")
    if per_token > num_experts:
        raise fields.wrong("num_experts_per_tok", f"at most {key}={num_experts}")
    return num_experts, per_token


def _qwen_kinds(fields: Fields, qwen3: bool, num_layers: int) -> tuple[LayerKind, ...]:
    """Qwen3 has its window in every layer, Qwen2 in every other one up to `max_window_layers`."""
    if not fields.boolean("use_sliding_window", False):
        return ()
    if qwen3:
        return uniform_window(num_layers, fields.optional_integer("sliding_window"))
    end = fields.integer("max_window_layers", _QWEN2_WINDOW_LAYERS, minimum=0)
    return read_window_kinds(
        fields, num_layers, lambda layer: SLIDING if layer % 2 == 0 and layer < end else FULL
    )
