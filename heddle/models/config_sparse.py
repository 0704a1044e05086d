"""Settings of top-k attention: DeepSeek-V3.2 on top of what V3 has."""

from __future__ import annotations

from heddle.config.model import MLAConfig, MoEConfig, SparseConfig
from heddle.models.config_fields import Fields


def read_sparse(fields: Fields, mla: MLAConfig, moe: MoEConfig | None) -> SparseConfig:
    """Read the sizes of the indexer.

    Args:
        fields: the top level of `config.json`.
        mla: widths of the attention below it.
        moe: its experts; None: every layer is dense.

    Raises:
        ModelFileError: a value is missing or malformed.
        UnsupportedError: layers differ from each other.
    """
    if mla.q_lora_rank is None:
        raise fields.wrong(
            "q_lora_rank", "the indexer reads the query latent; an integer is needed"
        )
    sparse = SparseConfig(
        num_heads=fields.integer("index_n_heads"),
        head_dim=fields.integer("index_head_dim"),
        top_k=fields.integer("index_topk"),
    )
    if sparse.head_dim < mla.qk_rope_head_dim:
        raise fields.wrong("index_head_dim", f"at least qk_rope_head_dim={mla.qk_rope_head_dim}")
    if "layer_types" in fields and set(fields.strings("layer_types")) != {"indexed_attention"}:
        raise fields.unsupported("layer_types", "every layer must have an indexer")
    if "mlp_layer_types" in fields:
        kinds = fields.strings("mlp_layer_types")
        num_dense = len(kinds) if moe is None else min(moe.first_dense_layers, len(kinds))
        if kinds != ("dense",) * num_dense + ("sparse",) * (len(kinds) - num_dense):
            raise fields.unsupported(
                "mlp_layer_types", f"the first {num_dense} must be dense, the others sparse"
            )
    return sparse
