"""Readings that every family shares."""

from __future__ import annotations

from heddle.config.model import ModelConfig, RopeConfig
from heddle.models.config_fields import MAX_LAYERS, Fields


def read_base(
    fields: Fields,
    architecture: str,
    eos: tuple[int, ...],
    rope: RopeConfig,
    *,
    default_head_dim: int | None = None,
    default_tied: bool = False,
) -> ModelConfig:
    """What every grouped-query model states, in the same words; a family replaces what it adds.

    Args:
        fields: the top level of `config.json`.
        architecture: of the model.
        eos: ids that end a text.
        rope: the rotary table.
        default_head_dim: of the family; None: hidden size over query heads.
        default_tied: what an absent `tie_word_embeddings` means.

    Raises:
        ModelFileError: a value is missing or malformed.
    """
    hidden_size = fields.integer("hidden_size")
    num_query_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_query_heads)
    if num_query_heads % num_kv_heads:
        rule = f"it must divide num_attention_heads={num_query_heads}"
        raise fields.wrong("num_key_value_heads", rule)
    head_dim = fields.integer(
        "head_dim", default_head_dim or max(1, hidden_size // num_query_heads)
    )
    if head_dim % 2:
        raise fields.wrong("head_dim", f"head width {head_dim} must be even, for rotary pairs")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers", maximum=MAX_LAYERS),
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=rope,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default_tied),
        bos_token_id=bos_token_id(fields),
        eos_token_ids=eos,
        checkpoint_dtype=checkpoint_dtype(fields),
    )


def require_silu(fields: Fields) -> None:
    """Refuse another activation than the gated SiLU."""
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.unsupported("hidden_act", "known: silu")


def checkpoint_dtype(fields: Fields) -> str:
    """Name of the stored dtype, without a prefix."""
    key = "dtype" if "dtype" in fields else "torch_dtype"
    return fields.text(key, "float32").removeprefix("torch.")


def bos_token_id(fields: Fields) -> int | None:
    """The id that starts a text, if any."""
    ids = fields.token_ids("bos_token_id")
    return ids[0] if ids else None
