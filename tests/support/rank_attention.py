"""Attention doubles: one rank's lanes of a cut model, and recorders."""

from __future__ import annotations

import torch

from heddle.attention.base import IndexRows
from heddle.config.model import ModelConfig
from heddle.layout.heads import HeadLayout
from tests.support.tiny import DenseAttention


class HeadMapAttention(DenseAttention):
    """Dense attention over one TP rank's lanes; kv heads are found by the global rule."""

    def __init__(self, config: ModelConfig, heads: HeadLayout, tp_rank: int) -> None:
        super().__init__(config)
        self._heads = heads
        self._group = config.num_query_heads // config.num_kv_heads
        self._first, self._last = heads.query_range(tp_rank)
        self._first_kv, _ = heads.kv_range(tp_rank // heads.slice_size)

    def gqa(self, layer, query, key, value, sinks=None):  # type: ignore[no-untyped-def]
        assert query.shape[1] == self._heads.lanes
        own = self._last - self._first
        assert (query[:, own:] == 0).all()  # pad lanes
        kv = [head // self._group - self._first_kv for head in range(self._first, self._last)]
        out = torch.zeros_like(query)
        sinks = None if sinks is None else sinks[:own]
        out[:, :own] = super().gqa(layer, query[:, :own], key[:, kv], value[:, kv], sinks)
        return out

    def mla(self, layer, query_nope, query_rope, latent, key_up, value_up, scale, index=None):  # type: ignore[no-untyped-def]
        own = self._last - self._first
        assert query_nope.shape[1] == len(key_up) == len(value_up) == self._heads.lanes
        assert (query_nope[:, own:] == 0).all()
        out = super().mla(layer, query_nope, query_rope, latent, key_up, value_up, scale, index)
        out[:, own:] = 0
        return out


class Recorder(DenseAttention):
    """Notes each layer's key (or latent) rows and the dtypes that arrive."""

    def __init__(self, config: ModelConfig | None = None) -> None:
        super().__init__(config)
        self.dtypes: set[torch.dtype] = set()
        self.keys: list[torch.Tensor] = []

    def gqa(self, layer, query, key, value, sinks=None):  # type: ignore[no-untyped-def]
        self.dtypes |= {tensor.dtype for tensor in (query, key, value)}
        self.keys.append(key)
        return super().gqa(layer, query, key, value, sinks)

    def mla(self, layer, query_nope, query_rope, latent, key_up, value_up, scale, index=None):  # type: ignore[no-untyped-def]
        tensors = (query_nope, query_rope, latent, key_up, value_up)
        self.dtypes |= {tensor.dtype for tensor in tensors}
        self.keys.append(latent)
        return super().mla(layer, *tensors, scale, index)


class IndexRecorder(DenseAttention):
    """Keeps what the indexers of sparse layers made, one entry per layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.index: list[IndexRows] = []

    def mla(self, layer, *tensors_and_index):  # type: ignore[no-untyped-def]
        self.index.append(tensors_and_index[-1])
        return super().mla(layer, *tensors_and_index)


class SliceAttention(HeadMapAttention):
    """For ranks that project the queries of their whole slice: own lanes are picked first.

    Keeps the queries of the first layer.
    """

    def __init__(self, config: ModelConfig, heads: HeadLayout, tp_rank: int) -> None:
        super().__init__(config, heads, tp_rank)
        place = tp_rank % heads.slice_size
        self._own_lanes = slice(place * heads.lanes, (place + 1) * heads.lanes)
        self.projected: torch.Tensor | None = None

    def gqa(self, layer, query, key, value, sinks=None):  # type: ignore[no-untyped-def]
        self._keep(query)
        return super().gqa(layer, query[:, self._own_lanes], key, value, sinks)

    def mla(self, layer, query_nope, query_rope, latent, key_up, value_up, scale, index=None):  # type: ignore[no-untyped-def]
        self._keep(torch.einsum("mhd,hdl->mhl", query_nope, key_up))
        own = self._own_lanes
        return super().mla(
            layer,
            query_nope[:, own],
            query_rope[:, own],
            latent,
            key_up[own],
            value_up,
            scale,
            index,
        )

    def _keep(self, query: torch.Tensor) -> None:
        assert query.shape[1] == self._heads.slice_size * self._heads.lanes
        if self.projected is None:
            self.projected = query
