"""Shapes and constants of DeepSeek-V2, V3 and V3.2: one latent row for all heads, and experts."""

from __future__ import annotations

from heddle.config.model import MLAConfig, ModelConfig, MoEConfig
from heddle.models.config_common import bos_token_id, checkpoint_dtype, require_silu
from heddle.models.config_fields import Fields
from heddle.models.config_rope import read_rope
from heddle.models.config_sparse import read_sparse


def read_latent_config(fields: Fields, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """Read a model with latent attention.

    Raises:
        ModelFileError: a value is missing or malformed.
        UnsupportedError: a setting is not built here.
    """
    require_silu(fields)
    mla = MLAConfig(
        q_lora_rank=fields.optional_integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
    )
    if mla.qk_rope_head_dim % 2:
        raise fields.wrong("qk_rope_head_dim", "it must be even, for rotary pairs")
    version3 = architecture != "DeepseekV2ForCausalLM"
    interleaved = fields.boolean("rope_interleave", True) if version3 else True
    attention_bias = fields.boolean("attention_bias", False)
    moe = _moe_config(fields, version3) if "n_routed_experts" in fields else None
    is_sparse = architecture == "DeepseekV32ForCausalLM"
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_query_heads=fields.integer("num_attention_heads"),
        num_kv_heads=1,
        head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=read_rope(fields, interleaved=interleaved),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=not version3 and fields.boolean("mlp_bias", False),
        mla=mla,
        moe=moe,
        sparse=read_sparse(fields, mla, moe) if is_sparse else None,
        bos_token_id=bos_token_id(fields),
        eos_token_ids=eos,
        checkpoint_dtype=checkpoint_dtype(fields),
    )


def _moe_config(fields: Fields, version3: bool) -> MoEConfig:
    num_experts = fields.integer("n_routed_experts")
    per_token = fields.integer("num_experts_per_tok")
    if per_token > num_experts:
        raise fields.wrong("num_experts_per_tok", f"at most n_routed_experts={num_experts}")
    if fields.integer("moe_layer_freq", 1) != 1:
        raise fields.unsupported(
            "moe_layer_freq", "every layer above the dense ones must be MoE (1)"
        )
    scoring = fields.text("scoring_func", "sigmoid" if version3 else "softmax")
    if scoring != ("sigmoid" if version3 else "softmax"):
        raise fields.unsupported("scoring_func", "V3 scores by sigmoid, V2 by softmax")
    method = fields.text("topk_method", "noaux_tc" if version3 else "greedy")
    legal = ("noaux_tc",) if version3 else ("greedy", "group_limited_greedy")
    if method not in legal:
        raise fields.unsupported("topk_method", f"known for this architecture: {', '.join(legal)}")
    normalize = fields.boolean("norm_topk_prob", version3)
    if normalize and not version3:
        # Public implementations disagree on whether scaling then still applies.
        raise fields.unsupported("norm_topk_prob", "V2 weights are not normalised (false)")
    grouped = method != "greedy"
    num_groups = fields.integer("n_group") if grouped else 1
    top_k_groups = fields.integer("topk_group") if grouped else 1
    if num_experts % num_groups:
        raise fields.wrong("n_group", f"it must divide n_routed_experts={num_experts}")
    if top_k_groups > num_groups:
        raise fields.wrong("topk_group", f"at most n_group={num_groups}")
    if per_token > top_k_groups * (num_experts // num_groups):
        room = top_k_groups * (num_experts // num_groups)
        raise fields.wrong("num_experts_per_tok", f"the chosen groups hold {room} experts")
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_token=per_token,
        num_shared_experts=fields.optional_integer("n_shared_experts", minimum=0) or 0,
        expert_intermediate_size=fields.integer("moe_intermediate_size"),
        first_dense_layers=fields.integer("first_k_dense_replace", 0, minimum=0),
        scoring="sigmoid" if version3 else "softmax",
        normalize_top_k=normalize,
        routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
        num_groups=num_groups,
        top_k_groups=top_k_groups,
        top_k_method=method,  # type: ignore[arg-type]  # checked against `legal` above
    )
