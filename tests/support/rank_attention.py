"""Attention doubles: one rank's lanes of a cut model, and recorders."""

from __future__ import annotations

import torch

from heddle.config.model import ModelConfig
from heddle.layout.heads import HeadLayout
from tests.support.tiny import DenseAttention


class HeadMapAttention(DenseAttention):
    """Dense attention over one TP rank's lanes; kv heads are found by the global rule."""

    def __init__(self, config: ModelConfig, heads: HeadLayout, tp_rank: int) -> None:
        self._heads = heads
        self._group = config.num_query_heads // config.num_kv_heads
        self._first, self._last = heads.query_range(tp_rank)
        self._first_kv, _ = heads.kv_range(tp_rank // heads.slice_size)

    def gqa(self, layer, query, key, value):  # type: ignore[no-untyped-def]
        assert query.shape[1] == self._heads.lanes
        own = self._last - self._first
        assert (query[:, own:] == 0).all()  # pad lanes
        kv = [head // self._group - self._first_kv for head in range(self._first, self._last)]
        out = torch.zeros_like(query)
        out[:, :own] = super().gqa(layer, query[:, :own], key[:, kv], value[:, kv])
        return out

    def mla(self, layer, query_nope, query_rope, latent, key_up, value_up, scale):  # type: ignore[no-untyped-def]
        own = self._last - self._first
        assert query_nope.shape[1] == len(key_up) == len(value_up) == self._heads.lanes
        assert (query_nope[:, own:] == 0).all()
        out = super().mla(layer, query_nope, query_rope, latent, key_up, value_up, scale)
        out[:, own:] = 0
        return out


class Recorder(DenseAttention):
    """Notes each layer's key (or latent) rows and the dtypes that arrive."""

    def __init__(self) -> None:
        self.dtypes: set[torch.dtype] = set()
        self.keys: list[torch.Tensor] = []

    def gqa(self, layer, query, key, value):  # type: ignore[no-untyped-def]
        self.dtypes |= {tensor.dtype for tensor in (query, key, value)}
        self.keys.append(key)
        return super().gqa(layer, query, key, value)

    def mla(self, layer, *tensors_and_scale):  # type: ignore[no-untyped-def]
        self.dtypes |= {tensor.dtype for tensor in tensors_and_scale[:-1]}
        self.keys.append(tensors_and_scale[2])
        return super().mla(layer, *tensors_and_scale)
