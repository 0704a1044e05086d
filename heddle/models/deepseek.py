"""DeepSeek-V2, V3 and V3.2: latent attention, and experts above the first layers.

A row of the cache is one latent vector and one rotary key for all heads. Keys and values of a head
are linear in the latent, so the two up-projections travel to the attention as matrices, and
attention decides on which side of the softmax to apply them. In V3.2 an indexer reads the query
latent and the row, too, and each query attends to the keys that it ranks highest.

Legend: `M` rows, `h` query-head lanes, `E` hidden size; `nope`, `rope`, `lat`, `v` the widths of
`MLAConfig`.

Source: arXiv 2405.04434 (V2), 2412.19437 (V3), and their model code.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from heddle.attention.base import StepOps
from heddle.config.model import MLAConfig
from heddle.models.base import BuildContext
from heddle.models.blocks import load_feed_forward, load_head_output
from heddle.models.decoder import Decoder, load_decoder
from heddle.models.layers.indexer import Indexer, load_indexer
from heddle.models.layers.linear import ColumnPart, Linear, load_columns
from heddle.models.layers.norm import RMSNorm
from heddle.models.layers.rotary import Turn
from heddle.models.scale import softmax_scale
from heddle.models.weights.loader import Piece

_LATENT_NORM_EPS = 1e-6  # of the published model code, whatever rms_norm_eps is


@dataclass(frozen=True, slots=True)
class QueryLatent:
    """The second half of a low-rank query projection."""

    norm: RMSNorm
    up: Linear
    """`[M, rank]`, normalised -> `[M, h * (nope + rope)]`."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Projections of one layer. Query or its latent, and key-value latent come from one product."""

    layer: int
    mla: MLAConfig
    query_and_latent: Linear
    query_latent: QueryLatent | None
    latent_norm: RMSNorm
    key_up: torch.Tensor  # [h, nope, lat]
    value_up: torch.Tensor  # [h, lat, v]
    output: Linear
    num_own_heads: int
    scale: float
    indexer: Indexer | None = None
    """Reads the normalised query latent, so there is one."""

    def __call__(self, x: torch.Tensor, rotation: Turn, ops: StepOps) -> torch.Tensor:
        """`[M, E]` -> this rank's part of the sum, `[M, E]`."""
        mla = self.mla
        query, latent, rotary_key = self.query_and_latent(x, ops).tensor_split(
            (-mla.kv_lora_rank - mla.qk_rope_head_dim, -mla.qk_rope_head_dim), dim=-1
        )
        index = None
        if self.query_latent is not None:
            query_latent = self.query_latent.norm(query)
            query = self.query_latent.up(query_latent, ops)
            if self.indexer is not None:
                index = self.indexer(x, query_latent, rotation)
        query = query.reshape(len(x), len(self.key_up), mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        query_nope, query_rope = query.tensor_split((mla.qk_nope_head_dim,), dim=-1)
        stored = torch.cat([self.latent_norm(latent), rotation(rotary_key[:, None])[:, 0]], dim=-1)
        mixed = ops.mla(
            self.layer,
            query_nope,
            rotation(query_rope),
            stored,
            self.key_up,
            self.value_up,
            self.scale,
            index,
        )
        return self.output(mixed[:, : self.num_own_heads].flatten(1), ops)


def load_deepseek(context: BuildContext) -> Decoder:
    """Load a model of this family."""
    mla = context.config.mla
    assert mla is not None, "set by the config reader"
    return load_decoder(
        context,
        rotary_width=mla.qk_rope_head_dim,
        load_attention=partial(_load_attention, context, mla),
        load_feed_forward=partial(load_feed_forward, context),
    )


def _load_attention(
    context: BuildContext, mla: MLAConfig, layer: int, name: str
) -> LatentAttention:
    config, loader = context.config, context.loader
    first, last = context.query_range
    query_and_latent, query_latent = _load_projections(context, mla, name)
    key_up, value_up = _load_up_projections(context, mla, name)
    latent_weight = loader.load(f"{name}.kv_a_layernorm.weight", (mla.kv_lora_rank,))
    return LatentAttention(
        layer=layer,
        mla=mla,
        query_and_latent=query_and_latent,
        query_latent=query_latent,
        latent_norm=RMSNorm(latent_weight, _LATENT_NORM_EPS, loader.kernels),
        key_up=key_up,
        value_up=value_up,
        output=load_head_output(context, name),
        num_own_heads=last - first,
        scale=softmax_scale(config),
        indexer=_load_indexer(context, mla, name),
    )


def _load_indexer(context: BuildContext, mla: MLAConfig, name: str) -> Indexer | None:
    sparse = context.config.sparse
    if sparse is None:
        return None
    assert mla.q_lora_rank is not None, "checked by the config reader"
    return load_indexer(
        context.loader,
        f"{name}.indexer",
        sparse,
        hidden_size=context.config.hidden_size,
        query_rank=mla.q_lora_rank,
        rope_width=mla.qk_rope_head_dim,
    )


def _load_projections(
    context: BuildContext, mla: MLAConfig, name: str
) -> tuple[Linear, QueryLatent | None]:
    """Whole latents on every rank, heads of the query cut by rank."""
    config, loader = context.config, context.loader
    width = mla.qk_nope_head_dim + mla.qk_rope_head_dim

    own, *more = [(first * width, last * width) for first, last in context.projected_ranges]

    def heads_part(side: str) -> ColumnPart:
        size, room = config.num_query_heads * width, context.heads.lanes * width
        return ColumnPart(f"{name}.{side}", size, own, room, more=tuple(more))

    def whole_part(side: str, size: int) -> ColumnPart:
        return ColumnPart(f"{name}.{side}", size, (0, size), size, config.qkv_bias)

    latent = whole_part("kv_a_proj_with_mqa", mla.kv_lora_rank + mla.qk_rope_head_dim)
    rank = mla.q_lora_rank
    if rank is None:
        return load_columns(loader, [heads_part("q_proj"), latent], config.hidden_size), None
    down = load_columns(loader, [whole_part("q_a_proj", rank), latent], config.hidden_size)
    weight = loader.load(f"{name}.q_a_layernorm.weight", (rank,))
    norm = RMSNorm(weight, _LATENT_NORM_EPS, loader.kernels)
    return down, QueryLatent(norm, load_columns(loader, [heads_part("q_b_proj")], rank))


def _load_up_projections(
    context: BuildContext, mla: MLAConfig, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key part `[h, nope, lat]` of the heads that are projected, value part `[h, lat, v]` of own
    heads; pad lanes are zeros.
    """
    width, lanes = mla.qk_nope_head_dim + mla.v_head_dim, context.heads.lanes
    shape = (context.config.num_query_heads * width, mla.kv_lora_rank)
    context.loader.check(f"{name}.kv_b_proj.weight", shape)
    ranges = context.projected_ranges
    up = context.loader.zeros(len(ranges), lanes, width, mla.kv_lora_rank)
    pieces = [
        Piece(up[place, : last - first].flatten(0, 1), (first * width, last * width))
        for place, (first, last) in enumerate(ranges)
    ]
    context.loader.fill_pieces(f"{name}.kv_b_proj.weight", shape, pieces)
    key_up = up[:, :, : mla.qk_nope_head_dim].flatten(0, 1)
    value_up = up[ranges.index(context.query_range), :, mla.qk_nope_head_dim :].transpose(1, 2)
    return key_up.contiguous(), value_up.contiguous()
