"""Two kinds of numbers in one message, bit for bit: nothing is converted on the way.

Legend: `R`, `n` rows, `K` places of a list, `Hi`, `Di` heads and width of the indexer.
"""

from __future__ import annotations

import torch

from heddle.attention.base import IndexRows
from heddle.attention.sparse.selection import Candidates


def pack_candidates(candidates: Candidates) -> torch.Tensor:
    """`[R, K, 2]` int32: the bits of the score, then the id."""
    return torch.stack((candidates.scores.view(torch.int32), candidates.ids), dim=-1)


def unpack_candidates(packed: torch.Tensor) -> Candidates:
    """From `[..., R, K, 2]`."""
    bits, ids = packed.unbind(-1)
    return Candidates(bits.contiguous().view(torch.float32), ids.contiguous())


def pack_queries(index: IndexRows) -> torch.Tensor:
    """`[n, Hi, Di + x]` in the dtype of the query; weights, at least float32, take x places."""
    query = index.index_query
    weights = index.weights.to(torch.promote_types(query.dtype, torch.float32))
    return torch.cat((query, weights.unsqueeze(-1).contiguous().view(query.dtype)), dim=-1)


def unpack_queries(packed: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Query `[..., Hi, Di]` and weights `[..., Hi]` again; `width` is `Di`."""
    dtype = torch.promote_types(packed.dtype, torch.float32)
    return packed[..., :width], packed[..., width:].contiguous().view(dtype).squeeze(-1)
