"""Shapes and constants of models with latent attention: DeepSeek-V2, V3 and V3.2, and GLM."""

from __future__ import annotations

from dataclasses import dataclass, replace

from heddle.config.model import MLAConfig, ModelConfig
from heddle.models.config_common import bos_token_id, checkpoint_dtype, require_silu
from heddle.models.config_fields import MAX_LAYERS, Fields
from heddle.models.config_rope import read_rope
from heddle.models.config_routing import RoutingDefaults, read_routed_experts
from heddle.models.config_sparse import read_sparse

_V3 = RoutingDefaults()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """In what the members differ."""

    is_sigmoid: bool = True
    """Experts are scored and corrected as in V3 and after it."""
    may_split_halves: bool = False
    """`rope_interleave` is a setting; else rotary pairs are neighbours."""
    has_mlp_bias: bool = False
    is_sparse: bool = False
    interleaves_index: bool = False
    """Rotary pairs of the indexer are neighbours, too."""
    defaults: RoutingDefaults = _V3


_FAMILIES = {
    "DeepseekV2ForCausalLM": _Family(is_sigmoid=False, has_mlp_bias=True),
    "DeepseekV3ForCausalLM": _Family(may_split_halves=True),
    "DeepseekV32ForCausalLM": _Family(is_sparse=True),
    "Glm4MoeLiteForCausalLM": _Family(
        may_split_halves=True,
        defaults=RoutingDefaults(
            num_groups=1, num_shared_experts=1, first_dense_layers=1, scaling=1.8
        ),
    ),
    "GlmMoeDsaForCausalLM": _Family(
        is_sparse=True,
        interleaves_index=True,
        defaults=RoutingDefaults(
            num_groups=1, num_shared_experts=1, first_dense_layers=3, scaling=2.5
        ),
    ),
}
LATENT_ARCHITECTURES = tuple(_FAMILIES)


def read_latent_config(fields: Fields, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """Read a model with latent attention.

    Raises:
        ModelFileError: a value is missing or malformed.
        UnsupportedError: a setting is not built here.
    """
    require_silu(fields)
    family = _FAMILIES[architecture]
    base = _read_base(fields, architecture, eos, interleaved=_read_interleaved(fields, family))
    mla = base.mla
    assert mla is not None, "set just above"
    sparse = read_sparse(fields, mla, base.num_layers) if family.is_sparse else None
    if sparse is not None:
        sparse = replace(sparse, interleaved=family.interleaves_index)
    return replace(
        base,
        mlp_bias=family.has_mlp_bias and fields.boolean("mlp_bias", False),
        moe=read_routed_experts(
            fields, base.num_layers, family.defaults, is_sigmoid=family.is_sigmoid
        ),
        sparse=sparse,
    )


def _read_interleaved(fields: Fields, family: _Family) -> bool:
    if family.may_split_halves:
        return fields.boolean("rope_interleave", True)
    if family.interleaves_index:
        for key in ("rope_interleave", "indexer_rope_interleave"):
            if not fields.boolean(key, True):
                raise fields.unsupported(key, "neighbours form a rotary pair in this family (true)")
    return True


def _read_base(
    fields: Fields, architecture: str, eos: tuple[int, ...], *, interleaved: bool
) -> ModelConfig:
    """All but the mixture and the indexer."""
    mla = MLAConfig(
        q_lora_rank=fields.optional_integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
    )
    if mla.qk_rope_head_dim % 2:
        raise fields.wrong("qk_rope_head_dim", "it must be even, for rotary pairs")
    attention_bias = fields.boolean("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers", maximum=MAX_LAYERS),
        num_query_heads=fields.integer("num_attention_heads"),
        num_kv_heads=1,
        head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=read_rope(fields, interleaved=interleaved),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mla=mla,
        bos_token_id=bos_token_id(fields),
        eos_token_ids=eos,
        checkpoint_dtype=checkpoint_dtype(fields),
    )
