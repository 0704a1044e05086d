"""Shapes and constants of Llama and of its relatives, differing by a bias, norm or window."""

from __future__ import annotations

from heddle.config.model import ModelConfig
from heddle.models.config_common import bos_token_id, checkpoint_dtype, require_silu
from heddle.models.config_fields import Fields
from heddle.models.config_rope import read_rope

_QWEN3_HEAD_DIM = 128  # of the family, whatever hidden_size / heads is


def read_dense_config(fields: Fields, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """Read a dense model.

    Raises:
        ModelFileError: a value is missing or malformed.
        UnsupportedError: a setting is not built here.
    """
    require_silu(fields)
    hidden_size = fields.integer("hidden_size")
    num_query_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_query_heads)
    if num_query_heads % num_kv_heads:
        rule = f"it must divide num_attention_heads={num_query_heads}"
        raise fields.wrong("num_key_value_heads", rule)
    qwen2, qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
    llama = architecture == "LlamaForCausalLM"
    attention_bias = (llama or qwen3) and fields.boolean("attention_bias", False)
    head_dim = fields.integer(
        "head_dim", _QWEN3_HEAD_DIM if qwen3 else max(1, hidden_size // num_query_heads)
    )
    if head_dim % 2:
        raise fields.wrong("head_dim", f"head width {head_dim} must be even, for rotary pairs")
    rope = read_rope(fields, interleaved=False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=rope,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        qk_norm=qwen3,
        qkv_bias=qwen2 or attention_bias,
        output_bias=attention_bias,
        mlp_bias=llama and fields.boolean("mlp_bias", False),
        sliding_window=_sliding_window(fields, architecture),
        bos_token_id=bos_token_id(fields),
        eos_token_ids=eos,
        checkpoint_dtype=checkpoint_dtype(fields),
    )


def _sliding_window(fields: Fields, architecture: str) -> int | None:
    """The window in tokens. Qwen files state one and switch it off by another key."""
    uses_window = architecture == "MistralForCausalLM" or (
        architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
        and fields.boolean("use_sliding_window", False)
    )
    return fields.optional_integer("sliding_window") if uses_window else None
