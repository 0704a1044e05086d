"""The lightning indexer of sparse attention: small queries and keys that rank keys for a row.

    query_j = rotate(up_j(query latent))        key = rotate(norm(down(x)))        `Hi` heads, 1 key
    weight_j = (x . w_j) / sqrt(Hi * Di)

The rotated part comes first in a head, its pairs are halves or neighbours whatever the main
attention uses, and angles are those of the main attention. Each TP rank computes all of it: it is
small, and the choice of keys must be the same for all heads. The reference multiplies queries and
keys by one orthogonal matrix before it rounds them to 8 bits; without that rounding the matrix
cancels out.

Legend: `M` rows, `E` hidden size, `Hi`, `Di` heads and width of the indexer, `rank` width of the
query latent.
Source: the DeepSeek-V3.2 report, "Lightning Indexer", and the model code of V3.2 and GLM-5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from heddle.attention.base import IndexRows
from heddle.config.model import SparseConfig
from heddle.models.layers.linear import Linear
from heddle.models.layers.rotary import Rotation, Turn
from heddle.models.weights.loader import WeightLoader

_NORM_EPS = 1e-6  # of the published model code, whatever rms_norm_eps is


@dataclass(frozen=True, slots=True)
class Indexer:
    """One layer's indexer, whole on every rank."""

    sparse: SparseConfig
    rope_width: int
    query_up: Linear
    key_down: Linear
    key_norm: torch.Tensor  # [Di]
    key_norm_bias: torch.Tensor  # [Di]
    weights: Linear
    """At least float32: a choice hangs on these numbers."""

    def __call__(self, x: torch.Tensor, query_latent: torch.Tensor, rotation: Turn) -> IndexRows:
        """`[M, E]` and `[M, rank]`, both normalised -> what attention needs of these rows."""
        assert isinstance(rotation, Rotation), "sparse layers have a rotary embedding"
        turns = rotation.turns._replace(interleaved=self.sparse.interleaved)
        turn = replace(rotation, turns=turns)
        heads, width = self.sparse.num_heads, self.sparse.head_dim
        query = self.query_up(query_latent).view(len(x), heads, width)
        key = functional.layer_norm(
            self.key_down(x), (width,), self.key_norm, self.key_norm_bias, _NORM_EPS
        )
        wide = torch.promote_types(x.dtype, torch.float32)
        weights = self.weights(x.to(wide)) * (heads * width) ** -0.5
        return IndexRows(
            self._rotate(query, turn), self._rotate(key.unsqueeze(1), turn).squeeze(1), weights
        )

    def _rotate(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """The leading part of `[M, heads, Di]`."""
        turned, plain = x.tensor_split((self.rope_width,), dim=-1)
        return torch.cat((rotation(turned), plain), dim=-1)


def load_indexer(
    loader: WeightLoader,
    name: str,
    sparse: SparseConfig,
    *,
    hidden_size: int,
    query_rank: int,
    rope_width: int,
) -> Indexer:
    """Load one layer's indexer.

    Args:
        loader: of the checkpoint.
        name: of the indexer's tensors.
        sparse: its sizes.
        hidden_size: `E`.
        query_rank: width of the query latent.
        rope_width: elements that are rotated.
    """
    heads, width = sparse.num_heads, sparse.head_dim
    wide = torch.promote_types(loader.dtype, torch.float32)
    return Indexer(
        sparse=sparse,
        rope_width=rope_width,
        query_up=Linear.of(
            loader.load(f"{name}.wq_b.weight", (heads * width, query_rank)), loader=loader
        ),
        key_down=Linear.of(loader.load(f"{name}.wk.weight", (width, hidden_size)), loader=loader),
        key_norm=loader.load(f"{name}.k_norm.weight", (width,)),
        key_norm_bias=loader.load(f"{name}.k_norm.bias", (width,)),
        weights=Linear.of(
            loader.load(f"{name}.weights_proj.weight", (heads, hidden_size), dtype=wide)
        ),
    )
