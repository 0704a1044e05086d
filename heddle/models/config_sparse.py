"""Settings of top-k attention: DeepSeek-V3.2 and GLM-5 on top of what V3 has."""

from __future__ import annotations

from heddle.config.model import MLAConfig, SparseConfig
from heddle.errors import ModelFileError
from heddle.models.config_fields import Fields


def read_sparse(fields: Fields, mla: MLAConfig, num_layers: int) -> SparseConfig:
    """Read the sizes of the indexer.

    Args:
        fields: the top level of `config.json`.
        mla: widths of the attention below it.
        num_layers: of the model.

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
    if set(_indexer_types(fields, num_layers)) != {"full"}:
        raise fields.unsupported(
            _sharing_key(fields), "every layer must have an indexer of its own (full)"
        )
    return sparse


def _sharing_key(fields: Fields) -> str:
    """The setting that says which layers have an indexer: the first one that a file has."""
    keys = ("indexer_types", "index_topk_pattern", "index_topk_freq")
    return next((key for key in keys if key in fields), keys[0])


def _indexer_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Per layer `full`, or `shared`: the choice of the layer before is used again."""
    key = _sharing_key(fields)
    if key == "index_topk_freq":
        every, first = fields.integer(key), fields.integer("index_skip_topk_offset", 2, minimum=0)
        turns = (max(layer - first + 1, 0) % every for layer in range(num_layers))
        return tuple("shared" if turn else "full" for turn in turns)
    if key not in fields:
        return ("full",) * num_layers
    try:
        types = fields.strings(key)
    except ModelFileError:
        types = tuple({"F": "full", "S": "shared"}.get(c, c) for c in fields.text(key))
    if len(types) != num_layers or set(types) - {"full", "shared"}:
        raise fields.wrong(key, f"{num_layers} times full or shared was expected")
    return types
